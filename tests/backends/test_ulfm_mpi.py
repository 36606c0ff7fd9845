"""What the library offers a job that outlives a rank: that it is there, and with nobody lost."""

import time

import pytest
from mpi4py import MPI

from mpidist.backends import ulfm
from mpidist.backends.liveness import FAULT_TOLERANT

VENDOR, VERSION = MPI.get_vendor()
HAS_IT = VENDOR == "Open MPI" and VERSION[0] >= 5


def test_reasons():
    name = f"{VENDOR} {'.'.join(map(str, VERSION))}"
    for value in ({}, {FAULT_TOLERANT: "0"}):
        reason = ulfm.why_not(value)
        assert reason.startswith(name) and "mpidist run --survive" in reason
    assert (ulfm.why_not({FAULT_TOLERANT: "1"}) is None) == HAS_IT


@pytest.mark.skipif(not HAS_IT, reason="needs Open MPI")
def test_nobody_is_lost(comm):
    own = comm.backend.comm.Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    assert ulfm.dead_ranks(own) == []
    assert ulfm.agree(own, True, time.monotonic() + 60) == (True, False)
    assert ulfm.agree(own, comm.rank > 0, time.monotonic() + 60) == (False, False)
    same = ulfm.shrink(own, time.monotonic() + 60)
    assert same.Get_size() == comm.size and same.Get_rank() == comm.rank
    same.Free()
    own.Free()


@pytest.mark.skipif(not HAS_IT, reason="needs Open MPI")
def test_rank_that_does_not_come_to_agree(comm):
    own = comm.backend.comm.Dup()
    if comm.size > 1 and comm.rank == 0:
        assert ulfm.agree(own, True, time.monotonic() + 0.2) is None
    comm.barrier()
    if comm.rank or comm.size == 1:
        assert ulfm.agree(own, True, time.monotonic() + 60) == (True, False)
    comm.barrier()
