"""Checkpoints under mpiexec."""

import pytest

from tests.support import checkpoint_cases
from tests.support.training_kits import KITS


@pytest.mark.parametrize("case", checkpoint_cases.CASES, ids=lambda case: case.__name__)
def test_checkpoint(comm, case, tmp_path):
    case(comm, tmp_path)


@pytest.mark.parametrize("zero", (False, True), ids=("whole", "zero"))
@pytest.mark.parametrize("kit", KITS)
def test_a_resumed_run_has_the_same_bits(comm, kit, zero, tmp_path):
    checkpoint_cases.a_resumed_run_has_the_same_bits(comm, kit, tmp_path, "adam", zero)


@pytest.mark.parametrize("where", ("save", "load"))
@pytest.mark.parametrize("meets", checkpoint_cases.MEETINGS)
def test_a_state_that_calls_collectives_on_some_ranks(comm, meets, where, tmp_path):
    checkpoint_cases.a_collective_of_some_states_is_an_error_on_all(comm, tmp_path, meets, where)
