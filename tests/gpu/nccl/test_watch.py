"""The watch aborts NCCL at the deadline of a queued call, or at an error."""

import threading
import time

import numpy as np
import pytest

from mpidist.device.find import find_device
from mpidist.device.recognise import as_device_array
from mpidist.errors import CommunicatorBroken
from tests.support.nccl import NcclError


@pytest.mark.parametrize("trouble", ["deadline", "error"])
def test_abort_after_the_deadline(by_nccl, monkeypatch, trouble):
    """Whoever waits for its stream is let go, and the communicator says why from then on."""

    def check(comm, library):
        comm.timeout = 0.001 if trouble == "deadline" else 60.0
        device = find_device()
        x = device.array(np.ones(3))
        comm.allreduce(x)
        gpu = comm.gpu
        assert not gpu._nccl.queue.watch.poll()  # it has ended
        comm.allreduce(x)
        monkeypatch.setattr("tests.support.emulated.EmulatedEvent.done", lambda self: False)
        words = "NCCL has not finished .*allreduce.* by its deadline; .*aborted"
        if trouble == "error":
            library.made[0].trouble = NcclError("remote process exited")
            words = "NCCL reports: remote process exited; NCCL was aborted"
        while gpu._nccl.queue.watch.poll():
            pass
        assert library.made[0].ended == "aborted"
        with pytest.raises(CommunicatorBroken, match=f"{words}; create a new one"):
            comm.allreduce(x)

    by_nccl(1, check, "nccl")


def test_aborted_by_the_thread_that_waits(by_nccl, monkeypatch):
    """Then the watch has nothing left to do: no traceback of its thread, no second abort."""

    def check(comm, library):
        comm.allreduce(find_device().array(np.ones(3)))
        queue = comm.gpu._nccl.queue
        monkeypatch.setattr("tests.support.emulated.EmulatedEvent.done", lambda self: False)
        comm.allreduce(find_device().array(np.ones(3)))
        queue.backend.abort()
        assert not queue.watch.poll()

    by_nccl(1, check, "nccl")


def test_call_that_does_not_return_is_ended(by_nccl, monkeypatch):
    """A thread that queues a call waits for a lost rank, and has the communicator until then."""
    monkeypatch.setattr("mpidist.gpu.nccl.backend.ABORT_AFTER", 0.05)

    def check(comm, library):
        comm.timeout = 0.1
        x = find_device().array(np.ones(3))
        comm.allreduce(x)
        queue, (made,) = comm.gpu._nccl.queue, library.made
        monkeypatch.setattr("tests.support.emulated.EmulatedEvent.done", lambda self: False)
        comm.allreduce(x)
        inside, aborted = threading.Event(), threading.Event()
        monkeypatch.setattr(made, "allReduce", lambda *_: (inside.set(), aborted.wait(20)))
        monkeypatch.setattr(made, "abort", aborted.set)
        data = as_device_array(x, 0)
        thread = threading.Thread(target=queue.backend.allreduce, args=(data, data, "sum"))
        thread.start()
        assert inside.wait(20)
        until = time.monotonic() + 10
        while queue.watch.poll():
            assert time.monotonic() < until
        assert aborted.is_set()
        thread.join(20)

    by_nccl(1, check, "nccl")
