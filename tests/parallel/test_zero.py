"""ZeRO and communication hooks on simulated ranks."""

import pytest

from mpidist import run_simulated
from mpidist.parallel.hooks import Compress, PowerSGD, TopK
from tests.support import zero_cases as cases
from tests.support.training_kits import KITS


@pytest.mark.parametrize("size", (1, 3))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer", ("sgd", "momentum", "adam"))
def test_zero(kit, optimizer, size):
    run_simulated(size, lambda comm: cases.zero_equals_one_process(comm, kit, optimizer))


@pytest.mark.parametrize("overlap", ("polls", "thread"))
def test_zero_overlapped(overlap):
    kit = KITS[0].values[0]
    run_simulated(3, lambda comm: cases.zero_equals_one_process(comm, kit, "adam", overlap))


@pytest.mark.parametrize("size", (1, 3))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize(
    "case",
    (
        cases.zero_clips_by_the_norm_of_all,
        cases.zero_is_made_before_the_first_step,
        cases.what_zero_cannot_do_is_refused,
        cases.unknown_optimizers_need_the_flag,
        cases.algorithms_of_a_saved_run,
    ),
)
def test_zero_cases(kit, case, size):
    run_simulated(size, lambda comm: case(comm, kit))


@pytest.mark.parametrize("size", (1, 3))
def test_elementwise(size):
    run_simulated(size, cases.an_unknown_optimizer_trains_with_the_flag)


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("name", cases.HOOKS)
def test_hooks(name, size):
    kit = KITS[0].values[0]
    run_simulated(size, lambda comm: cases.hooks_train_nearly_as_well(comm, kit, name))


@pytest.mark.parametrize("size", (2, 3))
def test_compression(size):
    run_simulated(size, cases.compression_is_what_it_says)
    run_simulated(size, cases.an_overflow_passes)
    run_simulated(size, cases.nothing_is_lost_when_buckets_change)


def test_wrong_hooks():
    run_simulated(1, cases.wrong_hooks_are_refused)


@pytest.mark.parametrize("make", (lambda: TopK(0.05), lambda: PowerSGD(1), lambda: Compress()))
def test_a_step_without_numbers(make):
    run_simulated(2, lambda comm: cases.a_step_without_numbers_passes(comm, make()))


def test_complex_numbers():
    run_simulated(2, cases.complex_numbers_are_not_made_real)
