"""DDP and Grid under mpiexec."""

import pytest

from tests.support import ddp_cases
from tests.support.training_kits import skip_if_too_few


@pytest.mark.parametrize("case", ddp_cases.CASES, ids=lambda case: case.__name__)
def test_ddp(comm, case):
    skip_if_too_few(case, comm.size)
    case(comm)


@pytest.mark.mpi(min_size=2)
def test_buckets_are_in_flight_together(comm):
    ddp_cases.buckets_are_in_flight_together(comm)
