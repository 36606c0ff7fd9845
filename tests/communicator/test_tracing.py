"""Traces without MPI: clocks, waits, limits, and jobs that are traced from outside."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist import run_simulated, trace
from mpidist.communicator import tracing
from mpidist.communicator.tracing import clock_offset
from mpidist.trace import Event, RankEvents, Recorder, add_waits, profiled, read
from tests.support import processes
from tests.support.jobs import each_mpi


def test_clocks_of_nodes(monkeypatch):
    """Rank 2 and 3 are on a node whose clock is 5 s ahead; found to within the error stated."""
    import threading
    import time

    ahead = threading.local()
    monkeypatch.setattr(
        tracing, "perf_counter", lambda: time.perf_counter() + getattr(ahead, "seconds", 0.0)
    )

    def job(comm):
        ahead.seconds = 5.0 if comm.rank > 1 else 0.0
        return clock_offset(comm)

    found = run_simulated(4, job, nodes=[0, 0, 1, 1])
    assert found[:2] == [(0.0, 0.0)] * 2 and found[2] == found[3]
    offset, error = found[2]
    assert 0 < error < 0.5 and abs(offset - 5.0) <= error
    assert run_simulated(2, job, nodes=[0, 0]) == [(0.0, 0.0)] * 2


def test_simulated_ranks(tmp_path):
    path = tmp_path / "a.json"

    def job(comm):
        with comm.trace(path):
            comm.allreduce(np.ones(3), algorithm="ring")
            comm.barrier()

    run_simulated(3, job, nodes=[0, 1, 2])
    calls = [e for e in read(path) if e.get("cat") == "collective"]
    assert sorted((e["pid"], e["name"]) for e in calls) == [
        (rank, name) for rank in range(3) for name in ("allreduce", "barrier")
    ]
    assert all("wait_us" in e["args"] for e in calls)


@pytest.mark.parametrize("library", ["torch", "cupy", "nvtx"])
def test_ranges_of_nvtx_under_nsight(library, monkeypatch):
    told = []
    push, pop = told.append, lambda: told.append("end")
    named = SimpleNamespace(range_push=push, range_pop=pop, RangePush=push, RangePop=pop)
    module = SimpleNamespace(cuda=SimpleNamespace(nvtx=named), push_range=push, pop_range=pop)
    module.version = SimpleNamespace(cuda="13.0")
    for name in ("torch", "cupy", "nvtx"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "torch.autograd.profiler", raising=False)
    monkeypatch.setitem(sys.modules, library, module)
    with profiled("without Nsight"):
        pass
    monkeypatch.setattr(trace, "NSIGHT", True)
    with profiled("step"), pytest.raises(ZeroDivisionError), profiled("bucket"):
        raise ZeroDivisionError
    assert told == ["step", "bucket", "end", "end"]
    if library == "torch":
        module.version.cuda = None  # its functions would raise
        with profiled("step"):
            assert len(told) == 4


def test_only_the_last_events_are_kept():
    recorder = Recorder(limit=3)
    for number in range(3):
        recorder.add(number)
    assert recorder.full
    recorder.add(3)
    assert list(recorder.events) == [1, 2, 3]


def call(rank, number, begin, end, size=2):
    place = ("world", rank, size)
    return Event("barrier", "collective", begin, end, 0, {"comm": place, "call": number})


def test_waits_are_counted_where_all_ranks_are_known():
    parts = [
        RankEvents(0, "a", 0.0, False, [call(0, 1, 1.0, 3.5), call(0, 2, 4.0, 5.0)]),
        RankEvents(1, "b", 0.0, True, [call(1, 1, 3.0, 3.5)]),  # of the other nothing is known
    ]
    add_waits(parts)
    first, alone = parts[0].events
    assert (first.details["wait_us"], first.details["last_rank"]) == (2e6, 1)
    assert parts[1].events[0].details["wait_us"] == 0 and "wait_us" not in alone.details


SCRIPT = """
import sys, mpidist
comm = mpidist.init()
comm.barrier()
part = comm.split(0)
part.allreduce(1)
if comm.rank: sys.exit(int(sys.argv[1]))
"""


@each_mpi
@pytest.mark.parametrize("status", [0, 3])
def test_a_job_is_traced_to_its_end(python, tmp_path, status):
    """Written at the end of the program, also by ranks that leave with an exit code."""
    script, path = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    words = [python, "-m", "mpidist", "run", "-n", "2", "--trace", str(path), str(script)]
    done = processes.run([*words, str(status)], 80, processes.environment())
    assert done.status == status, done.output
    calls = [e for e in read(path) if e.get("cat") == "collective"]
    assert sorted((e["pid"], e["name"]) for e in calls) == [
        (rank, name) for rank in range(2) for name in ("allreduce", "barrier")
    ]
    assert {e["args"]["site"] for e in calls} == {f"{script}:4", f"{script}:6"}
    about = json.loads(path.read_text())["otherData"]
    assert about["format"] == "mpidist trace 1"


def test_a_trace_that_cannot_be_written_is_refused_first(tmp_path):
    from click.testing import CliRunner

    from mpidist.commands.run import run_command

    told = CliRunner().invoke(run_command, ["--trace", str(tmp_path / "no" / "a"), "true"])
    assert told.exit_code and "--trace" in told.output or "cannot be written" in str(told.exception)
