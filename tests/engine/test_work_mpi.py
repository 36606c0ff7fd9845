"""What is under way when its communicator, its array or the right to write to it goes away."""

import gc

import numpy as np
import pytest

import mpidist

N = 100_000
WAYS = ["native", "ring", "symmetric"]


@pytest.mark.one_node
@pytest.mark.parametrize("how", WAYS)
def test_free_waits_for_what_is_under_way(comm, how):
    made = comm.split(0)
    x = made.empty(N)
    x[:] = comm.rank
    work = made.iallreduce(x, out=x, algorithm=how)
    made.free()
    assert work.wait() is x and work.done
    assert (x == comm.size * (comm.size - 1) / 2).all()
    with pytest.raises(mpidist.CommunicatorBroken, match="freed"):
        made.barrier()


@pytest.mark.one_node
@pytest.mark.parametrize("how", WAYS)
def test_dropped_communicator_keeps_pending_memory(comm, how):
    p, old = comm.size, None
    for k in range(5):
        made = comm.split(0)
        x = made.empty(N)
        x[:] = comm.rank
        made.iallreduce(x, out=x, algorithm=how)
        del made, x
        gc.collect()
        fresh = comm.empty(N)
        fresh[:] = k
        comm.allreduce(fresh, out=fresh)
        assert (fresh == k * p).all() and (old is None or (old == (k - 1) * p).all())
        old = fresh


def test_a_frozen_array_is_not_filled(comm):
    """Nor after three calls with the very same array, which is found without the checks by then.

    The flag that was set since is seen all the same, of short and of long arrays, which are served
    in different ways.  The root's array is only read, so it may be frozen.
    """
    for n in (10, N):
        x = np.full(n, comm.rank + 1.0)
        for _ in range(3):
            assert comm.broadcast(x)[-1] == 1
        if comm.rank == 0:
            x.flags.writeable = False
            assert comm.broadcast(x) is x
            continue
        x[:], x.flags.writeable = -1, False
        with pytest.raises(mpidist.InvalidArgument, match="read-only"):
            comm.broadcast(x)
        assert (x == -1).all()
        x.flags.writeable = True
        assert (comm.broadcast(x) == 1).all()
