"""The null backend: everything runs, nothing moves."""

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.backends.null import NullBackend
from mpidist.errors import CollectiveTimeout
from tests.support import collectives as cases


@pytest.mark.filterwarnings("ignore:(overflow|invalid)")  # what the memory held is added
@pytest.mark.parametrize(("collective", "name"), cases.WITHOUT_NATIVE)
def test_every_algorithm_runs_on_every_rank(collective, name):
    for size in (1, 2, 4, 7):
        for rank in range(size):
            comm = Communicator(NullBackend(size, rank))
            if cases.cannot(comm, collective, name) is not None:
                continue
            x = np.zeros(4 * size)
            out = np.zeros(4) if collective == "scatter" else None
            if collective == "scatter":
                comm.scatter(x, 0, out, algorithm=name)
            else:
                getattr(comm, collective)(x, algorithm=name)
            getattr(comm, f"i{collective}")(
                *((x, 0, out) if collective == "scatter" else (x,)), algorithm=name
            ).wait()


def test_sends_and_receives():
    comm = Communicator(NullBackend(3))
    comm.send(np.ones(3), 2)
    assert comm.recv(np.full(3, 5.0), 1).tolist() == [5, 5, 5]
    comm.barrier()
    assert comm.split(0).size == 1
    comm.free()


def test_waits_end():
    comm = Communicator(NullBackend(2))
    comm.timeout = 0.05
    assert not comm.backend.wait(lambda: False, 0.0)
    assert comm.backend.missing(1) == (0,)
    report = comm._service.sequencer.timed_out("allreduce", 1, "ring")
    assert isinstance(report, CollectiveTimeout) and "rank 0: allreduce" in str(report)
