"""run_simulated(): what it raises when a rank fails, waits for ever, or takes too long."""

import threading
import time

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.errors import CollectiveMismatch, DeadlockError

SOON = 40.0  # seconds: before the default deadline, on a loaded machine too


def test_raising_rank_is_reported():
    def body(comm):
        if comm.rank == 3:
            raise ZeroDivisionError("mine")
        comm.barrier()

    with pytest.raises(ZeroDivisionError, match="rank 3: mine"):
        run_simulated(4, body)


@pytest.mark.parametrize("way", ["all receive", "one is missing", "other algorithms"])
def test_deadlocks_are_seen_at_once(way):
    def body(comm):
        if way == "all receive":
            comm.recv(np.empty(3), (comm.rank + 1) % 3)
        elif way == "one is missing":
            if comm.rank:
                comm.allreduce(1, algorithm="ring")
        else:
            comm.allgather(1, algorithm="linear" if comm.rank else "ring")

    begin = time.monotonic()
    with pytest.raises((DeadlockError, CollectiveMismatch), match=r"rank \d"):
        run_simulated(3, body)
    assert time.monotonic() - begin < SOON


def test_timeout_of_a_run():
    stop = threading.Event()
    with pytest.raises(TimeoutError, match=r"\[1\] have not ended within 3.0 s"):
        run_simulated(2, lambda comm: comm.rank and stop.wait(SOON), timeout=3.0)
    stop.set()
