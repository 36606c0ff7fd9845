"""Training on simulated ranks."""

import pytest
import training_cases as cases
from training_kits import KITS

from mpidist import run_simulated

SIZES = (1, 3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_training(case, kit, size):
    run_simulated(size, lambda comm: case(comm, kit))


@pytest.mark.parametrize("size", (4,))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer, overlap, passes, options", cases.ONE_PROCESS)
def test_equals_one_process(kit, size, optimizer, overlap, passes, options):
    run_simulated(
        size,
        lambda comm: cases.equals_one_process(comm, kit, optimizer, overlap, passes, **options),
    )


@pytest.mark.parametrize("overlap", ("polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_early_buckets(kit, overlap):
    run_simulated(3, lambda c: cases.early_buckets_are_launched_in_backward(c, kit, overlap))


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer", ("sgd", "momentum", "adam"))
def test_uneven_inputs(kit, optimizer):
    run_simulated(3, lambda comm: cases.uneven_inputs(comm, kit, optimizer))
