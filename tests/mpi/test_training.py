"""Training under mpiexec."""

import pytest
import training_cases as cases
from training_kits import KITS


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.__name__)
def test_training(comm, case, kit):
    case(comm, kit)


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer, overlap, passes, options", cases.ONE_PROCESS)
def test_equals_one_process(comm, kit, optimizer, overlap, passes, options):
    cases.equals_one_process(comm, kit, optimizer, overlap, passes, **options)


@pytest.mark.parametrize("overlap", ("polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_early_buckets(comm, kit, overlap):
    cases.early_buckets_are_launched_in_backward(comm, kit, overlap)


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer", ("sgd", "momentum", "adam"))
def test_uneven_inputs(comm, kit, optimizer):
    cases.uneven_inputs(comm, kit, optimizer)


@pytest.mark.parametrize("kit", KITS)
def test_a_forgotten_sync(comm, kit, caplog):
    cases.a_forgotten_sync_is_told(comm, kit, caplog)
