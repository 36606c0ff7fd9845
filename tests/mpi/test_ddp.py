"""DDP and Grid under mpiexec."""

import ddp_cases
import pytest


@pytest.mark.parametrize("case", ddp_cases.CASES, ids=lambda case: case.__name__)
def test_ddp(comm, case):
    case(comm)


def test_buckets_are_in_flight_together(comm):
    if comm.size > 1:
        ddp_cases.buckets_are_in_flight_together(comm)
