"""mpidist.run starts real MPI processes and returns their results."""

import os
import threading
import time

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument, LaunchError

LIMIT = 200  # seconds; each takes a few


def total(comm, factor=1):
    return comm.allreduce(np.full(3, comm.rank + 1) * factor).tolist()


def lock(comm):
    return threading.Lock()


def test_results_by_rank(capfd):
    def square(comm):
        print(f"rank {comm.rank} of {comm.size} on {comm.backend.name}", flush=True)
        return comm.rank**2

    assert mpidist.run(square, 3, timeout=LIMIT) == [0, 1, 4], "a function of a function"
    printed = capfd.readouterr().out
    assert all(f"rank {rank} of 3 on mpi" in printed for rank in range(3))
    assert mpidist.run(total, 2, 10, timeout=LIMIT) == [[30] * 3] * 2, "a function of a module"


def test_the_error_of_the_rank_that_failed():
    def fail(comm):
        if comm.rank == 1:
            raise ValueError("odd")
        comm.barrier()

    with pytest.raises(ValueError, match="odd") as caught:
        mpidist.run(fail, 2, timeout=LIMIT)
    assert getattr(caught.value, "__notes__", ["on rank 1 of 2"]) == ["on rank 1 of 2"]


def test_a_rank_that_dies():
    with pytest.raises(LaunchError, match=r"ranks? .*1.* of 2 left no result"):
        mpidist.run(lambda comm: os._exit(3) if comm.rank else comm.barrier(), 2, timeout=LIMIT)


def test_timeout():
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="timeout=8 s"):
        mpidist.run(lambda comm: time.sleep(LIMIT), 2, timeout=8)
    assert time.monotonic() - begun < LIMIT / 2


@pytest.mark.parametrize(("fn", "n"), [(total, 0), (total, True), (total, 1.5), ("total", 2)])
def test_bad_input(fn, n):
    with pytest.raises(InvalidArgument, match="expected a"):
        mpidist.run(fn, n)


def test_what_cannot_be_pickled():
    named = r"args\[1\] of type _thread.lock cannot be pickled: TypeError: "
    with pytest.raises(InvalidArgument, match=named):
        mpidist.run(total, 2, 1, threading.Lock())
    with pytest.raises(InvalidArgument, match="last of type _thread.lock cannot be pickled"):
        mpidist.run(total, 2, last=threading.Lock())
    named = r"rank 0: the result of fn, of type _thread.lock cannot be pickled: TypeError: "
    with pytest.raises(InvalidArgument, match=named):
        mpidist.run(lock, 1)
