"""Collectives of NCCL in the background: their streams, and what ranks compare."""

import numpy as np
import pytest

from mpidist.device.find import find_device
from mpidist.errors import CollectiveMismatch, CommunicatorBroken, Unsupported
from tests.support.nccl import Fake


def test_native_is_that_of_nccl_in_the_background_too(by_nccl):
    def check(comm, library):
        x = find_device().array(np.ones(4, "i2"))
        with pytest.raises(Unsupported, match="allreduce 'native': .*NCCL has no 'sum' of int16"):
            comm.iallreduce(x, algorithm="native")
        with pytest.raises(Unsupported, match="scan 'native': NCCL has no scan"):
            comm.scan(x, algorithm="native")
        assert not library.made
        assert (comm.iallreduce(x, algorithm="ring").wait().get() == 2).all() and not library.made

    by_nccl(2, check)


def test_background_calls_wait_on_streams(by_nccl):
    def check(comm, library):
        device = find_device()
        stream = device.new_stream()
        device.use(stream)
        x = device.array(np.zeros(5))
        x += comm.rank + 1.0  # queued
        work = comm.iallreduce(x, "mean", out=x)
        assert work.wait() is x
        x *= 2.0
        assert (x.get() == 3.0).all() and work.done
        device.use(0)

    by_nccl(2, check)


def test_after_a_stream_that_is_gone(by_nccl):
    def check(comm, library):
        device = find_device()
        stream = device.new_stream()
        device.use(stream)
        assert (comm.allreduce(device.array(np.ones(5))).get() == 2).all()
        device.use(0)
        device.release_stream(stream)
        assert (comm.allreduce(device.array(np.ones(5))).get() == 2).all()

    by_nccl(2, check, "nccl")


@pytest.mark.parametrize("first", ["test", "wait", "watch"])
def test_background_calls_are_compared(by_nccl, monkeypatch, first):
    """Both ranks are told of the two calls, and neither waits for the deadline in NCCL."""
    queued = []
    for name in ("allReduce", "reduce"):
        monkeypatch.setattr(Fake, name, lambda self, *_, name=name: queued.append(name))

    def check(comm, library):
        beside, x = comm.split(0), find_device().array(np.ones(3))
        work = comm.iallreduce(x, "sum", out=x)
        work.wait()
        number = comm.backend.board.reached(comm.rank)
        assert number and comm.gpu._nccl.queue.watch.poll() is False
        beside.barrier()
        monkeypatch.setattr("tests.support.emulated.EmulatedEvent.done", lambda self: False)
        if comm.rank == 0:
            late = comm.iallreduce(x, "sum", out=x)
            assert not late.test() and comm.gpu._nccl.queue.watch.poll()
            beside.send(np.ones(1), 1)
            beside.recv(np.ones(1), 1)
            if first == "watch":
                assert not comm.gpu._nccl.queue.watch.poll()
                assert library.made[0].ended == "aborted"
                for call in (late.test, late.wait, comm.barrier):
                    with pytest.raises(CommunicatorBroken, match="CollectiveMismatch.*different"):
                        call()
            else:
                with pytest.raises(CollectiveMismatch, match="allreduce op=sum.* and a differ"):
                    getattr(late, first)()
        else:
            beside.recv(np.ones(1), 0)
            with pytest.raises(CollectiveMismatch, match="reduce op=sum root=0.* and a differ"):
                comm.ireduce(x, "sum", out=x)
            beside.send(np.ones(1), 0)
        assert comm.broken is not None and comm.backend.board.reached(comm.rank) > number

    by_nccl(2, check, "nccl")
    assert sorted(queued) == ["allReduce"] * 3
