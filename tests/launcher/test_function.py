"""mpidist.run starts real MPI processes and returns their results."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist.errors import CollectiveTimeout, CommunicatorBroken, InvalidArgument, LaunchError
from mpidist.launcher import function
from tests.support.jobs import ROOT, each_mpi
from tests.support.processes import environment, run
from tests.support.training_kits import NEEDS_TORCH

LIMIT = 200  # seconds; each takes a few
SIGNS = "BAD TERMINATION", "prterun", "mpiexec", "MPI_ABORT", "Abort("


def total(comm, factor=1):
    return comm.allreduce(np.full(3, comm.rank + 1) * factor).tolist()


def slow_total(comm, folder):
    """A total once the file "go" is there, or after the limit."""
    until = time.monotonic() + LIMIT
    while not os.path.exists(f"{folder}/go") and time.monotonic() < until:
        time.sleep(0.01)
    return int(comm.allreduce(comm.rank))


def lock(comm):
    return threading.Lock()


@pytest.mark.long
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


def test_the_error_that_others_follow(tmp_path):
    """Rank 0 learns of the deadline that rank 1 has missed, and may be the first to end."""
    errors = CommunicatorBroken("rank 0: rank 1 has failed"), CollectiveTimeout("rank 1: recv")
    for rank, error in enumerate(errors):
        (tmp_path / f"error-{rank}").write_bytes(pickle.dumps(error))
        os.utime(tmp_path / f"error-{rank}", (rank, rank))
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        function._results(tmp_path, 2, "", "")


def test_a_rank_that_dies():
    with pytest.raises(LaunchError, match=r"ranks? .*1.* of 2 left no result"):
        mpidist.run(lambda comm: os._exit(3) if comm.rank else comm.barrier(), 2, timeout=LIMIT)


@pytest.mark.long
def test_timeout():
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="timeout=8 s"):
        mpidist.run(lambda comm: time.sleep(LIMIT), 2, timeout=8)
    assert time.monotonic() - begun < LIMIT / 2


RUNS = """import mpidist, os, signal, subprocess, sys, time
def leaves(comm):
    subprocess.Popen(["sleep", "300"])
    return comm.rank
def stubborn(comm):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(300)
def waits(comm):
    open(f"{os.environ['TMPDIR']}/pid-{os.getpid()}", "w").close()
    time.sleep(300)
def dies(comm):
    print("before", flush=True)
    os._exit(3) if comm.rank else comm.barrier()
begun = time.monotonic()
try:
    print(mpidist.run(globals()[sys.argv[1]], 2, timeout=float(sys.argv[2])))
except mpidist.MpidistError as error:
    print(f"{type(error).__name__}: {error}")
print("seconds:", time.monotonic() - begun)
"""


def called(python, folder, fn, timeout):
    """The output of a program that calls mpidist.run, and the seconds of the call."""
    (folder / "runs.py").write_text(RUNS)
    words = [python, "runs.py", fn, str(timeout)]
    done = run(words, LIMIT, environment(TMPDIR=str(folder)), cwd=folder)
    output, _, seconds = done.output.rpartition("seconds: ")
    assert not done.timed_out and not list(folder.glob("mpidist-run-*")), done.output
    return output, float(seconds)


@pytest.mark.long
@each_mpi
def test_processes_that_ranks_leave_behind(python, tmp_path):
    """A process left behind keeps the output's pipes open: here each rank leaves a sleep of 300 s.

    run() must return when the launcher ends, not when the pipes close.
    """
    output, seconds = called(python, tmp_path, "leaves", 100)
    assert output == "[0, 1]\n" and seconds < 60


@pytest.mark.long
@each_mpi
def test_ranks_that_ignore_signals(python, tmp_path):
    output, seconds = called(python, tmp_path, "stubborn", 6)
    assert output == "LaunchError: run: the processes took longer than timeout=6 s\n"
    assert seconds < 60


@each_mpi
def test_the_launchers_boxes(python, tmp_path):
    output, _ = called(python, tmp_path, "dies", LIMIT)
    assert "before" in output and "ended with exit code 3; last lines:" in output
    assert not [sign for sign in SIGNS if sign in output], output


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_caller(python, number, tmp_path):
    """The ranks end with it, and nothing is left; after SIGKILL the next run removes the folder."""
    (tmp_path / "runs.py").write_text(RUNS)
    words, until = [python, "runs.py", "waits", str(LIMIT)], time.monotonic() + LIMIT
    caller = subprocess.Popen(words, env=environment(TMPDIR=str(tmp_path)), cwd=tmp_path)
    try:
        while len(ranks := [p.name[4:] for p in tmp_path.glob("pid-*")]) < 2:
            assert time.monotonic() < until and caller.poll() is None
            time.sleep(0.05)
        caller.send_signal(number)
        assert caller.wait(LIMIT) == -number
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            assert time.monotonic() < until, "the ranks go on"
            time.sleep(0.05)
    finally:
        caller.kill()
    assert len(list(tmp_path.glob("mpidist-run-*"))) == (number == signal.SIGKILL)
    if number == signal.SIGKILL:
        called(python, tmp_path, "leaves", LIMIT)


@pytest.mark.long
def test_the_folder_of_a_run_that_goes_on(monkeypatch, tmp_path):
    """Another run beside it leaves it alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = []

    def outer():
        results.append(mpidist.run(slow_total, 1, str(tmp_path), timeout=LIMIT))

    thread = threading.Thread(target=outer)
    thread.start()
    while not list(tmp_path.glob("mpidist-run-*/call")):
        assert thread.is_alive()
        time.sleep(0.01)
    seen = list(tmp_path.glob("mpidist-run-*"))
    mpidist.run(total, 1, timeout=LIMIT)
    assert all(path.exists() for path in seen)
    (tmp_path / "go").touch()
    thread.join()
    assert results == [[0]] and not list(tmp_path.glob("mpidist-run-*"))


@pytest.mark.long
def test_a_call_outside_of_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(mpidist.run(total, 1, timeout=LIMIT)))
    thread.start()
    thread.join()
    assert results == [[[1] * 3]]


@pytest.mark.parametrize(("fn", "n"), [(total, 0), (total, True), (total, 1.5), ("total", 2)])
def test_bad_input(fn, n):
    with pytest.raises(InvalidArgument, match="expected a"):
        mpidist.run(fn, n)


@pytest.mark.long
def test_what_cannot_be_pickled():
    named = r"args\[1\] of type _thread.lock cannot be pickled: TypeError: "
    with pytest.raises(InvalidArgument, match=named):
        mpidist.run(total, 2, 1, threading.Lock())
    with pytest.raises(InvalidArgument, match="last of type _thread.lock cannot be pickled"):
        mpidist.run(total, 2, last=threading.Lock())
    named = r"rank 0: the result of fn, of type _thread.lock cannot be pickled: TypeError: "
    with pytest.raises(InvalidArgument, match=named):
        mpidist.run(lock, 1)


def in_a_group(comm):
    import torch
    import torch.distributed as dist

    import mpidist.torch  # noqa: F401

    total = torch.ones(1)
    if comm is not None:
        dist.init_process_group("mpidist")
        dist.all_reduce(total)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return int(total), [int(os.environ[name]) for name in names]


@pytest.mark.long
def test_variables_of_a_group_of_this_process():
    """Ranks that inherit RANK, WORLD_SIZE and MASTER_PORT of it find each other by MPI."""
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    code = (
        "import mpidist, torch.distributed as dist; dist.init_process_group('mpidist')\n"
        "from tests.launcher.test_function import LIMIT, in_a_group\n"
        "print(in_a_group(None), mpidist.run(in_a_group, 2, timeout=LIMIT))"
    )
    done = run([sys.executable, "-c", code], LIMIT, environment(PYTHONPATH=str(ROOT)))
    assert done.status == 0, done.output
    assert "(1, [0, 1, 0, 1]) [(2, [0, 2, 0, 2]), (2, [1, 2, 1, 2])]" in done.output
