"""StopRequest: all ranks stop at one step, and leave together."""

import os
from time import sleep

import pytest

from mpidist import StopRequest, run_simulated


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
