"""``mpidist check`` on trainings with and without a planted fault, as a user calls it."""

import sys

import pytest

from tests.support.checked import Checked
from tests.support.how_long import takes_minutes
from tests.support.jobs import each_mpi
from tests.support.processes import run
from tests.support.training_kits import NEEDS_TORCH, torch

needs_torch = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)


def test_check_of_a_clean_numpy_training_finds_every_phase_equal():
    found = Checked("array", "clean", "adam")
    found.assert_equal()
    phases = {phase for _, phase, _ in found.rows}
    assert phases == {"start", "batch", "forward", "gradients", "parameters", "optimizer"}
    assert "2 × 16 samples = the reference's 32" in found.output


@pytest.mark.long
def test_check_of_a_parameter_that_was_replaced_names_it():
    found = Checked("array", "replaced", ranks=3, steps=1)
    found.assert_differs("gradients", "first: 2.weight", "all ranks", "2.weight", "replaced")


@pytest.mark.long
def test_check_of_a_sharded_optimizer_finds_it_equal():
    Checked("array", "clean", "zero", ranks=3).assert_equal()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("nothing", 2, "without a step of an optimizer"),
        ("fails", 2, '    raise RuntimeError("no data set")\nRuntimeError: no data set\n'),
        ("leaves", 2, "\nno data set\n"),
        ("random", 2, "two runs as one process differ in step 1, batch"),
    ],
)
def test_check_of_a_script_that_cannot_be_compared_says_why(fault, status, words):
    found = Checked("array", fault)
    assert found.status == status, found.output
    assert words in found.output


def test_check_of_a_script_that_fails_on_a_rank_shows_its_error_and_the_steps_before():
    found = Checked("array", "rare")
    assert found.status == 1
    assert {step for step, *_ in found.rows} == {1}
    assert found.first is None
    assert "the script failed on 2 ranks:" in found.output
    assert "RuntimeError: a rare mistake" in found.output


@pytest.mark.long
def test_check_of_a_script_that_fails_where_the_others_are_done_shows_its_error():
    found = Checked("array", "late", ranks=3)
    assert found.status == 1
    assert found.cause == "the script failed on rank 1: RuntimeError: a late mistake"
    assert "the script failed on 3 ranks:" in found.output


@pytest.mark.long
def test_check_of_a_script_that_exits_compares_the_steps_before():
    Checked("array", "exits").assert_equal(1)


def test_check_of_a_missing_script_names_it():
    finished = run([sys.executable, "-m", "mpidist", "check", "none.py"], 60)
    assert finished.status == 2
    assert "none.py: no such script" in finished.output


@needs_torch
@pytest.mark.long
def test_check_of_a_clean_torch_training_finds_it_equal():
    Checked("torch", "clean", "optimizer=adam").assert_equal()


LIBRARIES = ["array", pytest.param("torch", marks=needs_torch)]


@pytest.mark.long
@pytest.mark.parametrize("library", LIBRARIES)
def test_check_of_a_reproducible_training_finds_the_same_bits(library):
    found = Checked("reproducible", "clean", library, ranks=3)
    found.assert_equal()
    assert "3 × 8 samples = the reference's 24" in found.output
    assert found.output.count("the same bits as one process") == 6, found.output


@pytest.mark.long
@needs_torch
def test_check_of_a_model_beside_a_reproducible_one_needs_no_equal_bits():
    found = Checked("reproducible", "beside", "torch")
    found.assert_equal()
    assert "the same bits as one process" in found.output


@pytest.mark.long
@needs_torch
def test_check_of_samples_that_another_model_computes_finds_them_equal():
    Checked("gan", "clean", steps=4).assert_equal(4)


@pytest.mark.long
@needs_torch
def test_check_of_two_optimizers_names_the_step_whose_gradient_was_kept():
    found = Checked("gan", "kept", steps=3)
    cause = "those of step 1, too, on 1 of 2 ranks"
    found.assert_differs("gradients", "model2.0.weight", "all ranks", cause)


@pytest.mark.long
@pytest.mark.parametrize("library", LIBRARIES)
def test_check_of_a_reproducible_training_names_a_gradient_with_other_bits(library):
    found = Checked("reproducible", "bits", library)
    found.assert_differs("gradients", "0.weight", "other bits", "reproducible= promises the same")


ARRAY = {
    "same": ("batch", "3 × 16", "rank 0, 1", "ranks 0, 1 train on the same samples"),
    "start": ("start", "0.weight", "rank 1, 2", "before the first step"),
    "state": ("parameters", "0.weight", "rank 1", "another state"),
    "list": ("gradients", "2.bias", "missing on rank 1", "has no 2.bias"),
    "order": ("batch", "3 × 16", "rank 1", "another order"),
    "zero": ("gradients", "2.bias", "all ranks", "zero on ranks 0, 1, 2"),
    "unsynchronised": ("gradients", "0.weight", "all ranks", "no gradient is averaged"),
    "N": ("gradients", "0.weight", "all ranks", "N times"),
    "1/N": ("gradients", "0.weight", "all ranks", "1/N times"),
    "N2": ("gradients", "0.weight", "all ranks", "N² times"),
    "loss_N": ("forward", "loss", "all ranks", "N times"),
    "one_rank": ("gradients", "0.weight", "all ranks", "rank 2's samples"),
    "skipped": ("batch", "16 + 32 + 16", "rank 1", "rank 1 skipped"),
    "halves": ("gradients", "0.weight", "all ranks", "float16"),
}

TORCH = {
    "same": ("batch", "2 × 16", "all ranks", "train on the same samples"),
    "start": ("start", "body.weight", "rank 1", "before the first step"),
    "dropout": ("forward", "drop", "all ranks", "Dropout is on"),
    "batchnorm": ("forward", "norm", "all ranks", "BatchNorm1d", "SyncBatchNorm"),
    "zero": ("gradients", "body.weight", "missing on rank 0, 1", "None on ranks 0, 1"),
    "N": ("gradients", "body.weight", "all ranks", "N times"),
    "1/N": ("gradients", "body.weight", "all ranks", "1/N times"),
    "N2": ("gradients", "body.weight", "all ranks", "N² times"),
    "unsynchronised": ("gradients", "body.weight", "all ranks", "no gradient is averaged"),
    "one_rank": ("gradients", "body.weight", "all ranks", "rank 1's samples"),
    "state": ("gradients", "head.bias", "missing on rank 1", "has no head.bias"),
    "skipped": ("batch", "16 + 32", "rank 1", "rank 1 skipped"),
    "sum": ("gradients", "body.weight", "all ranks", "sum over samples"),
    "order": ("batch", "2 × 16", "rank 1", "another order"),
    "contrastive": ("forward", "loss", "all ranks", "contrastive"),
    "loss_N": ("forward", "loss", "all ranks", "N times"),
    "lr": ("parameters", "body.weight", "rank 1", "learning rate"),
    "uneven": ("forward", "loss", "all ranks", "7, 6 samples", "uneven"),
}
OF_DDP = {"halves": ("gradients", "body.weight", "all ranks", "float16")}
OF_STOCK = {
    "replaced": ("gradients", "head.weight", "all ranks", "head.weight", "replaced"),
    "start": ("start", "head.bias", "rank 1", "before the first step"),
}
PLANTED = [
    *(("array", (fault,), 3, found) for fault, found in ARRAY.items()),
    *(("torch", (fault,), 2, found) for fault, found in {**TORCH, **OF_DDP}.items()),
    *(
        ("torch", (fault, "wrapper=stock"), 2, found)
        for fault, found in {**TORCH, **OF_STOCK}.items()
        if fault != "uneven"  # a DistributedSampler repeats samples
    ),
]


@takes_minutes
@needs_torch
@pytest.mark.parametrize(
    ("library", "words", "ranks", "found"), PLANTED, ids=lambda x: x if isinstance(x, str) else None
)
def test_planted_fault_is_named(library, words, ranks, found):
    Checked(library, *words, ranks=ranks, steps=3).assert_differs(*found)


CLEAN = [
    *(("array", (optimizer,), 3) for optimizer in ("sgd", "adam", "zero", "double")),
    *(
        ("torch", (f"wrapper={wrapper}", f"model={model}", f"optimizer={optimizer}"), ranks)
        for wrapper, ranks in (("ddp", 2), ("stock", 2), ("zero", 4))
        for model in ("mlp", "cnn", "gpt")
        for optimizer in ("sgd", "adam")
    ),
    *(
        ("torch", (f"wrapper={wrapper}", f"model={model}", "dtype=bfloat16"), 2)
        for wrapper, model in (("ddp", "mlp"), ("stock", "cnn"), ("ddp", "gpt"))
    ),
]


@takes_minutes
@needs_torch
@pytest.mark.parametrize(("library", "words", "ranks"), CLEAN)
def test_clean_training_is_equal(library, words, ranks):
    Checked(library, "clean", *words, ranks=ranks, steps=3).assert_equal(3)


@pytest.mark.long
@each_mpi
def test_check_under_each_mpi(python):
    Checked("array", "clean", python=python).assert_equal()
    Checked("array", "N", python=python).assert_differs("gradients", "0.weight", "all", "N times")
