"""``mpidist check`` on pipelines: names, rows of microbatches, one process with all stages."""

import pickle

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import Unsupported
from mpidist.nn import Linear, Module, ReLU, Sequential
from mpidist.oracle import pipelines
from mpidist.oracle.array_taps import LIBRARY
from mpidist.oracle.pipelines import Cuts
from mpidist.oracle.plan import Plan, StageForm, Stages
from mpidist.oracle.sketch import row_ids, sketch_rows
from mpidist.oracle.taps import Joined, Taps
from tests.support.checked import Checked
from tests.support.how_long import takes_minutes
from tests.support.jobs import each_mpi
from tests.support.training_kits import NEEDS_TORCH, torch

needs_torch = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
X = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
SHAPES = ((4, 4), (4,)), ((4, 4), (4,), (4, 3), (3,))  # of the parameters of the two stages


def layers():
    return [Linear(4, 4, seed=1), ReLU(), Linear(4, 4, seed=2), ReLU(), Linear(4, 3, seed=3)]


@pytest.fixture
def cuts(monkeypatch):
    """A Cuts that records every Partition."""
    monkeypatch.setattr(md.pipeline.Partition, "__init__", md.pipeline.Partition.__init__)
    made = Cuts()
    made.install()
    return made


def taps_of(folder, role="ranks", **options):
    folder = folder / role
    folder.mkdir(exist_ok=True)
    return Taps(Plan(role, 2, 5, **options), folder, 0)


def test_names_in_a_stage_of_a_partition_are_those_of_the_model(cuts):
    parts = md.partition(Sequential(*layers()), 2, verbose=False)
    naming = cuts.naming(parts[1], 1)
    start = parts.layers[1][0]
    assert [naming(name) for name in ("", "0", "1.weight")] == [
        None,
        str(start),
        f"{start + 1}.weight",
    ]


def test_names_in_a_stage_made_by_hand_begin_with_its_number(cuts):
    naming = cuts.naming(Sequential(*layers()), 3)
    assert [naming(name) for name in ("", "0.weight")] == ["stage3", "stage3.0.weight"]


def test_tied_parameter_has_its_name_in_the_model(tmp_path, cuts):
    taps, stage = taps_of(tmp_path), Sequential(*layers())
    first = stage.layers[0].weight
    held = taps.know_stage(LIBRARY, stage, cuts.naming(stage, 1), {"0.weight": first})
    assert {"0.weight", "stage1.0.bias"} <= held
    assert "stage1.0.weight" not in held


def test_microbatches_of_a_pipeline_add_up_to_the_batch(tmp_path, cuts):
    taps, stage = taps_of(tmp_path), Sequential(*layers())
    taps.know_stage(LIBRARY, stage, cuts.naming(stage, 0), {})
    whole, ids = np.array(stage(X)), row_ids([X])
    taps.begin_batch(ids, leader=0)
    for start, stop in ((0, 3), (3, 7)):
        with taps.microbatch(start, stop):
            taps.call(LIBRARY, Module.__call__, stage, (X[start:stop],), {})
    found = taps.step.tensors["forward"]["stage0"].parts[0]
    sums, squares = sketch_rows("stage0", whole, ids)
    assert found.rows == 7 and taps.step.samples.tolist() == ids.tolist()
    assert np.allclose(found.sums, sums.sum(0), atol=1e-5)
    assert found.squares == pytest.approx(squares.sum(), rel=1e-5)


def test_call_outside_of_a_step_of_the_pipeline_is_not_recorded(tmp_path, cuts):
    taps, stage = taps_of(tmp_path), Sequential(*layers())
    taps.know_stage(LIBRARY, stage, cuts.naming(stage, 0), {})
    taps.call(LIBRARY, Module.__call__, stage, (X,), {})
    assert not taps.step.tensors and not taps.step.ids


def reference(folder, forms, first=(0,)):
    start = folder / "ranks"
    start.mkdir(exist_ok=True)
    return taps_of(folder, "reference", start=str(start), stages=Stages(4, 1, first, forms))


def test_reference_has_the_whole_model_where_the_script_cuts_it(tmp_path, cuts):
    forms = {0: StageForm((0, 2), SHAPES[0], 0), 1: StageForm((2, 5), SHAPES[1], 1)}
    taps = reference(tmp_path, forms)
    parts = md.partition(Sequential(*layers()), 1, verbose=False)
    stages, numbers, tied = pipelines._whole(taps, cuts, [parts[0]], None)
    assert (stages, numbers, tied) == ([parts[0]], [0], {})
    assert taps.joined is None


def test_reference_reads_stages_that_other_ranks_made_by_hand(tmp_path, cuts):
    taps = reference(tmp_path, {k: StageForm(None, SHAPES[k], k) for k in (0, 1)})
    own, other = Sequential(*layers()[:2]), Sequential(*layers()[2:])
    mine, theirs = own.layers[0].weight, other.layers[0].weight
    file = {1: (other, None, {})}, {"shared": theirs}
    (tmp_path / "ranks" / "stages-000001").write_bytes(pickle.dumps(file))
    stages, numbers, tied = pipelines._whole(taps, cuts, [own], {"shared": mine})
    assert numbers == [0, 1] and stages[0] is own
    assert tied == {"shared": [mine, stages[1].layers[0].weight]}
    assert taps.joined.own == own.parameters()
    assert taps.joined.others == stages[1].parameters()
    optimizer = md.nn.SGD(own.parameters(), 0.1)
    taps.join(LIBRARY, optimizer, optimizer.parameters)
    assert optimizer.parameters == [*own.parameters(), *stages[1].parameters()]


@pytest.mark.parametrize(
    ("shapes", "words"), [(SHAPES[0], "cannot be pickled"), (((9, 9),), "chunk 0")]
)
def test_stages_that_cannot_be_joined_are_refused(tmp_path, cuts, shapes, words):
    forms = {0: StageForm(None, shapes, 0), 1: StageForm(None, SHAPES[1], 1)}
    with pytest.raises(Unsupported, match=words):
        pipelines._whole(reference(tmp_path, forms), cuts, [Sequential(*layers()[:2])], None)


def test_optimizer_of_several_groups_for_joined_stages_is_refused(tmp_path, cuts):
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    from mpidist.torch.taps import LIBRARY as of_torch

    own, others = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    taps = taps_of(tmp_path, "reference")
    taps.joined = Joined(list(own.parameters()), list(others.parameters()))
    optimizer = torch.optim.SGD([{"params": [p]} for p in own.parameters()], 0.1)
    with pytest.raises(Unsupported, match="an optimizer of several groups: expected stages of md"):
        taps.join(of_torch, optimizer, list(own.parameters()))


def test_zero_optimizer_for_joined_stages_is_refused(tmp_path, cuts):
    taps = taps_of(tmp_path, "reference")
    taps.joined = Joined([], [])
    with pytest.raises(Unsupported, match="with a ZeroOptimizer: expected stages of md.partition"):
        taps.zero_step(None, None)


# -- scripts --------------------------------------------------------------------------------------


@pytest.mark.long
def test_check_of_a_clean_pipeline_finds_every_phase_equal():
    found = Checked("pipeline", "clean", "library=array", "schedule=zb-h1")
    found.assert_equal()
    assert "1 × 32 samples = the reference's 32" in found.output


@pytest.mark.long
def test_check_of_stages_made_by_hand_says_what_the_reference_has():
    found = Checked("pipeline", "clean", "library=array", "stages=hand")
    found.assert_equal()
    assert "as one process, the script makes rank 0's stages" in found.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("halves", "a pipeline's forward() and backward(): expected step()"),
        ("apart", "step() gets a part of its arguments on each rank"),
        ("two", "more than one pipeline in a script"),
        ("singles", "md.shard of single samples, and a pipeline with replicas: expected"),
    ],
)
def test_check_of_a_pipeline_that_cannot_be_compared_says_why(fault, words):
    ranks = 4 if fault == "singles" else 2
    found = Checked("pipeline", fault, "library=array", "pipe=2", ranks=ranks)
    assert found.status != 0 and words in found.output


@pytest.mark.long
def test_check_of_a_pipeline_that_no_rank_can_make_shows_its_error():
    found = Checked("pipeline", "clean", "library=array", "pipe=1")
    assert found.status != 0 and "AssertionError" not in found.output
    assert "comm has size 1: expected >= 2" in found.output, found.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("skipped", ("batch", "several batches", "rank 1", "skipped the optimizer's step 1")),
        ("targets", ("batch", "the targets are not", "rank 1", "targets on rank 1")),
        ("rate", ("parameters", "8.weight", "rank 1", "learning rate")),
        ("kept", ("gradients", "8.weight", "rank 1", "those of step 1, too", "zero_grad()")),
    ],
)
def test_fault_in_a_pipeline_of_arrays_is_named(fault, words):
    Checked("pipeline", fault, "library=array").assert_differs(*words)


@pytest.mark.long
@each_mpi
def test_check_of_a_pipeline_under_each_mpi(python):
    Checked("pipeline", "clean", "library=array", python=python).assert_equal()


FAULTS = {
    "first stage": ("gradients", "4.inner.weight", "missing on rank 1", "optimizer of rank 1"),
    "order": ("batch", "targets", "rank 1", "targets on rank 1", "inputs on rank 0"),
    "targets": ("batch", "targets", "rank 1", "targets on rank 1"),
    "summed": ("forward", "loss", "all ranks", "M times", "M = 4"),
    "clipped": ("gradients", "0.weight", "rank 0", "pipe.clip_gradients()"),
    "skipped": ("batch", "several batches", "rank 1", "skipped the optimizer's step 1"),
    "batchnorm": ("forward", "first: 5", "rank 1", "each microbatch's samples"),
    "rate": ("parameters", "4.inner.weight", "rank 1", "learning rate"),
}


@takes_minutes
@needs_torch
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named(fault):
    Checked("pipeline", fault, steps=3).assert_differs(*FAULTS[fault])


@takes_minutes
@needs_torch
def test_sum_of_microbatches_is_named_in_a_grid():
    found = Checked("pipeline", "summed", "pipe=2", ranks=4)
    found.assert_differs("forward", "loss", "all ranks", "M × N times", "M = 4")


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
CLEAN = [
    *(
        (ranks, f"library={library}", f"schedule={schedule}")
        for ranks in (2, 4)
        for library in ("torch", "array")
        for schedule in SCHEDULES
    ),
    (4, "pipe=2"),
    (4, "pipe=2", "library=array", "schedule=gpipe"),
    (4, "pipe=2", "optimizer=adam", "schedule=interleaved"),
    (4, "pipe=2", "optimizer=zero"),
    (2, "tied=yes"),
    (2, "tied=yes", "schedule=zb-v", "optimizer=adam"),
    (2, "tied=yes", "stages=traced"),
    (2, "stages=hand"),
    (4, "stages=hand", "pipe=2"),
]


@takes_minutes
@needs_torch
@pytest.mark.parametrize("words", CLEAN, ids=lambda words: " ".join(map(str, words)))
def test_clean_pipeline_is_equal(words):
    Checked("pipeline", "clean", *words[1:], ranks=words[0], steps=3).assert_equal(3)
