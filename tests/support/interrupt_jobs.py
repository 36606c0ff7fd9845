"""Jobs in which a rank is stopped or interrupted inside an operation, and may go on.

``mpiexec -n N python interrupt_jobs.py NAME``; tests/engine/test_interrupts.py reads what they say.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

import mpidist
from mpidist.errors import CollectiveTimeout, CommunicatorBroken, RankFailed
from tests.support.failure_jobs import HANG, expect, start, usable
from tests.support.job_words import say, stay

WHO = 1
N = 200_000


class Trap:
    """A sum in the middle of which a rank sends itself a signal, once, when it is armed."""

    def __init__(self, number: int):
        self.number, self.armed = number, False

    def __call__(self, a, b):
        if self.armed and a.size > 2:
            self.armed = False
            os.kill(os.getpid(), self.number)
        return a + b


def summing(comm, how, trap):
    """Give what sums an array by a way; it has been used before, and its next use is a trap."""
    x, op = comm.empty(N), mpidist.Op(trap)
    right = comm.size * (comm.size + 1) / 2

    def call():
        x[:] = comm.rank + 1
        out = x if how == "symmetric" else np.empty(N)
        assert (comm.allreduce(x, op, out=out, algorithm=how) == right).all()

    call()
    trap.armed = comm.rank == WHO
    return call


def is_stopped(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def wake(pid):
    """Let a process go on once it is seen to have stopped."""
    end = time.monotonic() + HANG
    while not is_stopped(pid):
        assert time.monotonic() < end
        os.sched_yield()
    os.kill(pid, signal.SIGCONT)


def stopped_for_a_while(how):
    """Before the deadline it goes on: all get the right sums, as if nothing had been."""
    comm = start(timeout=HANG)
    pids, call = comm.allgather_object(os.getpid()), summing(comm, how, Trap(signal.SIGSTOP))
    if comm.rank == 0:
        threading.Thread(target=wake, args=(pids[WHO],)).start()
    for _ in range(3):
        call()
    usable(comm)


def stopped_for_too_long(how):
    """The others are told who it is; it goes on then, and nothing is overwritten or hangs."""
    comm = start()
    pids, call = comm.allgather_object(os.getpid()), summing(comm, how, Trap(signal.SIGSTOP))
    kept = np.arange(float(N))
    if comm.rank == WHO:
        try:
            call()  # the others had done their part
        except (CollectiveTimeout, RankFailed):
            say(comm, "late")
        expect((CollectiveTimeout, CommunicatorBroken, RankFailed), comm.barrier, f"rank {WHO}:")
    else:
        expect(CollectiveTimeout, call, "all ranks have arrived", f"rank {WHO} is STOPPED")
        expect(CommunicatorBroken, comm.barrier, "broken since allreduce")
        if comm.rank == 0:
            wake(pids[WHO])
    assert (kept == np.arange(float(N))).all()
    say(comm, "named")
    stay((0, 1), "named")


def interrupted(how):
    """Ctrl-C on one rank, on the default communicator: its end is the end of the job."""
    comm = start(timeout=HANG)
    call = summing(comm, how, Trap(signal.SIGINT))
    if comm.rank == WHO:
        expect(KeyboardInterrupt, call)
        expect(CommunicatorBroken, comm.barrier, "broken since allreduce", "KeyboardInterrupt")
        say(comm, "named")
        sys.exit(3)
    call()
    say(comm, "went on")


def interrupted_elsewhere(how):
    """Ctrl-C on one rank, which ends: the others need not wait for the deadline."""
    comm = start().split(0)
    comm.timeout = HANG
    call = summing(comm, how, Trap(signal.SIGINT))
    begin = time.monotonic()
    if comm.rank == WHO:
        expect(KeyboardInterrupt, call)
        say(comm, "named")
        sys.exit(3)
    expect(RankFailed, call, f"rank {comm.rank}:", f"rank {WHO}", "has left in the middle")
    assert time.monotonic() - begin < 5
    say(comm, "named")
    stay((0, 2), "named")


def interrupted_and_stays(how):
    """It stays: the others are told at the deadline who is behind; new communicators work."""
    comm = start()
    again = comm.split(0)
    again.timeout = HANG
    call = summing(comm, how, Trap(signal.SIGINT))
    if comm.rank == WHO:
        expect(KeyboardInterrupt, call)
    else:
        expect(CollectiveTimeout, call, "all ranks have arrived", f"rank {WHO} is behind")
    expect(CommunicatorBroken, comm.barrier, "broken since allreduce")
    x = again.empty(N)
    x[:] = comm.rank + 1
    again.allreduce(x, out=x, algorithm="symmetric")
    assert (x == comm.size * (comm.size + 1) / 2).all()
    usable(again)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
