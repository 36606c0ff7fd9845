"""What layers above the communicator use of it."""

import numpy as np
import pytest

from mpidist.calls.arrays import address
from mpidist.communicator.layers import guard, is_symmetric
from mpidist.errors import CommunicatorBroken, Unsupported
from tests.support.messages import beside, done, stay_away


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.mpi(min_size=2)
def test_guard_breaks_the_communicator(comm):
    """What fails within it leaves the communicator broken; what does not changes nothing."""
    sub = beside(comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with guard(sub, "exchange"):
        pending = [sub.post_recv(np.empty(2), left), sub.post_send(np.ones(2), right)]
        sub.wait_all(pending)
    assert sub.broken is None and sub.allreduce(1) == sub.size
    error = ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError) as caught:
        with guard(sub, "second exchange"):
            late = sub.post_recv(np.empty(2), left)
            raise error
    assert caught.value is error and not late.test()
    assert "second exchange" in sub.broken and "ZeroDivisionError: mine" in sub.broken
    with pytest.raises(CommunicatorBroken, match=f"rank {comm.rank}: .*second exchange"):
        sub.post_send(np.ones(2), right)
    with pytest.raises(CommunicatorBroken, match="second exchange"):
        with guard(sub, "third exchange"):
            raise AssertionError("it must not be entered")
    assert comm.allreduce(1) == comm.size
    sub = beside(comm)
    if sub.rank == 0:
        with pytest.raises(ZeroDivisionError), guard(sub, "an exchange"):
            raise ZeroDivisionError
        for rank in range(1, comm.size):
            done(comm, rank)
    else:  # what waits for a rank that failed alone does not wait until the deadline
        stay_away(comm, [0])
        with pytest.raises(CommunicatorBroken, match="rank 0 has failed before this operation"):
            sub.allreduce(np.ones(3), algorithm="ring")
    assert comm.allreduce(1) == comm.size


def test_is_symmetric_of_an_array_by_empty_while_it_lives(comm):
    """From its first byte to its last; simulated ranks share no memory, so they have no such array.

    An array of numpy is never symmetric.
    """
    ordinary = np.ones(4)
    assert not is_symmetric(comm, address(ordinary))
    if comm.backend.native is None:
        with pytest.raises(Unsupported, match="no shared memory"):
            comm.empty(4)
        return
    x = comm.empty(4)
    first, last = address(x), address(x) + x.nbytes - 1
    assert is_symmetric(comm, first)
    assert is_symmetric(comm, last)
    assert not is_symmetric(comm, address(ordinary))
    del x
    assert not is_symmetric(comm, first)
