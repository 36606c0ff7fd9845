"""StopRequest: all ranks stop at one step, and leave together."""

import os
from time import sleep
from types import SimpleNamespace

import pytest

from mpidist import InvalidArgument, StopRequest, run_simulated, stop


def test_leave_waits_for_all():
    """A rank that ended before the others had saved would end the job."""
    arrived = []

    def main(comm):
        request = StopRequest(comm, ())
        sleep(0.2 * comm.rank)
        arrived.append(comm.rank)
        with pytest.raises(SystemExit) as caught:
            request.leave()
        assert sorted(arrived) == [0, 1, 2]
        return caught.value.code

    assert run_simulated(3, main) == [os.EX_TEMPFAIL] * 3


@pytest.mark.parametrize("asked", (0, 2))
def test_one_rank_is_enough(asked):
    """Whoever was asked: all are told, and not before."""

    def main(comm):
        request = StopRequest(comm, ())
        before = request.requested()
        if comm.rank == asked:
            request._note(0, None)  # the handler: only the main thread gets signals
        return before, request.requested()

    assert run_simulated(3, main) == [(False, True)] * 3


def test_codes_that_are_none():
    """The communicator stays usable."""

    def main(comm):
        request = StopRequest(comm, ())
        for status in (-1, 256, "3", True, 7.0):
            with pytest.raises(InvalidArgument, match=f"leave: status={status!r}: expected a wh"):
                request.leave(status)
        return comm.allreduce(1)

    assert run_simulated(2, main) == [2, 2]


def test_leave_is_for_all_ranks_of_a_training(monkeypatch):
    def main(comm):
        part = comm.split(comm.rank % 2)
        with pytest.raises(InvalidArgument, match=r"of 2 ranks: expected one of the 4 that md\.el"):
            StopRequest(part, ()).leave()
        return comm.allreduce(1)

    of = SimpleNamespace(size=4)
    monkeypatch.setattr(stop, "in_elastic", [SimpleNamespace(comm=of, training=1, generation=0)])
    assert run_simulated(4, main) == [4] * 4
