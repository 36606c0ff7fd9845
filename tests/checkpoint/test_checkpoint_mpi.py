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
