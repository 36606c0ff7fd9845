"""Liveness: the ends of processes, as the kernel tells them."""

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from mpidist.backends import liveness
from mpidist.backends.liveness import Liveness, how_ended
from mpidist.errors import RankFailed

WITHIN = 30.0  # seconds, on a loaded machine; usually 1 ms


@contextlib.contextmanager
def child(code="import sys; sys.stdin.read()"):
    """A process that ends with its input, or as `code` says; it is reaped at the end only."""
    made = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        yield made
    finally:
        made.stdin.close()
        made.kill()
        made.wait()


def watched(pids, left=()):
    return Liveness(0, {0: os.getpid(), **pids}, lambda rank: rank in left)


def loss(alive):
    """What `check` raises, once it does."""
    until = time.monotonic() + WITHIN
    while time.monotonic() < until:
        try:
            alive.check()
        except RankFailed as error:
            return error
        time.sleep(1e-4)
    raise AssertionError("check() did not raise")


def files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("closely", [False, True])
def test_process_with_much_memory_is_lost_before_it_is_freed(closely):
    """The kernel takes some 50 ms for 200 MB, and only then is the file descriptor readable."""
    hold = "x = bytearray(b'1') * (200 << 20); print(1, flush=True); import sys; sys.stdin.read()"
    for _ in range(20):  # this process may lose its core for as long
        made = subprocess.Popen(
            [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with made, child() as other:
            assert made.stdout.read(1) == b"1"
            alive = watched({1: made.pid, 2: other.pid})
            handle = os.pidfd_open(made.pid)
            made.kill()
            error = None
            while not (alive.look() if closely else error):
                try:
                    alive.check()
                except RankFailed as failed:
                    error = failed
            freed = select.select([handle], [], [], 0)[0]
            os.close(handle)
            assert (
                alive.lost[1].endswith("was killed by signal 9 (SIGKILL)") and len(alive.lost) == 1
            )
        if not freed:
            return
    raise AssertionError("it was never known before")


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_killed_process(number, reaped):
    with child() as one, child() as other:
        alive = watched({1: one.pid, 3: other.pid})
        alive.check()
        other.send_signal(number)
        if reaped:
            other.wait()
        error = loss(alive)
        assert error.ranks == (3,) and list(error.reasons) == [3]
        assert str(error).startswith("rank 0: rank 3 on ")
        told = f"was killed by signal {number.value} ({number.name})"
        # Before Linux 6.15 nobody but the parent knows the exit code of a process that is reaped.
        assert str(error).endswith(told) or (reaped and str(error).endswith("has ended"))
        assert alive.lost == error.reasons


@pytest.mark.parametrize("code", [0, 3])
def test_process_that_ends_without_a_word(code):
    with child(f"import os; os._exit({code})") as one:
        error = loss(watched({1: one.pid}))
        assert error.ranks == (1,) and "has ended" in str(error)


def test_exit_code_other_than_zero_is_a_loss_though_the_rank_has_left():
    with child("import os; os._exit(3)") as one:
        assert "has ended with exit code 3" in str(loss(watched({1: one.pid}, left=[1])))


def test_rank_that_has_left_and_ends_well_is_not_lost():
    with child("") as one, child() as other:
        alive = watched({1: one.pid, 2: other.pid}, left=[1])
        one.wait()
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            alive.check()
        other.kill()
        assert loss(alive).ranks == (2,)


def test_process_that_is_dead_already():
    with child("") as one:
        one.wait()
        assert loss(watched({1: one.pid})).ranks == (1,)


def test_several_communicators_share_what_they_watch():
    before = files()
    with child() as one:
        first = watched({1: one.pid})
        opened = files()
        second, third = watched({4: one.pid}), watched({2: one.pid})
        assert files() == opened
        one.kill()
        assert loss(second).ranks == (4,)
        assert dict(third.look()).keys() == {2} and dict(first.look()).keys() == {1}
        later = watched({1: one.pid})  # a zombie is dead, too
        assert loss(later).ranks == (1,)
        del first, second, third, later
    assert files() <= before + 1  # the poller, and the pipe of the child is closed


def test_files_are_closed_with_the_last_communicator():
    with child() as one, child() as other:
        before = files()
        alive, second = watched({1: one.pid, 2: other.pid}), watched({1: one.pid})
        del alive
        assert files() <= before + 2
        del second
        assert files() <= before + 1


def test_a_fork_neither_closes_nor_reads_what_its_parent_watches():
    with child() as one:
        alive = watched({1: one.pid})
        pid = os.fork()
        if not pid:
            del alive
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
        alive.check()
        one.kill()
        assert loss(alive).ranks == (1,)


def test_two_at_once():
    with child() as one, child() as other:
        alive = watched({1: one.pid, 2: other.pid})
        one.kill(), other.kill()
        one.wait(), other.wait()
        error = loss(alive)
        assert error.ranks == (1, 2) and "; rank 2 on " in str(error)


def test_kernel_without_process_files(monkeypatch):
    """Then nothing is known, and nothing fails."""

    def refused(pid):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    with child() as one:
        alive = watched({1: one.pid})
        one.kill()
        one.wait()
        alive.check()
        assert alive.look() == {}


def test_look_at_a_live_process_is_short():
    with child() as one:
        alive = watched({1: one.pid})
        best = 1.0
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(200):
                alive.check()
            best = min(best, (time.perf_counter() - begin) / 200)
        assert best < 5e-6, f"{1e6 * best:.2f} µs"


def test_texts():
    assert how_ended(None) == "has ended"
    assert how_ended(9) == how_ended(9 | 0x80) == "was killed by signal 9 (SIGKILL)"
    assert how_ended(3 << 8) == "has ended with exit code 3"
    assert how_ended(40) == "was killed by signal 40"
    error = liveness.failed(1, {3: "has ended", 2: "was killed"}, "barrier (collective #3)")
    assert str(error) == (
        "rank 1: barrier (collective #3) cannot complete: rank 2 was killed; rank 3 has ended"
    )
    assert error.ranks == (2, 3)
