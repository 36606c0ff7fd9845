"""The roll call: of jobs that really hang, one hang after another; of processes and made-up ranks.

Each hang ends once its roll call is printed, and the job goes on: so nothing was disturbed.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpidist.backends.recorder import Recorder
from mpidist.errors import InvalidArgument
from mpidist.launcher.program import RANK_PROGRAM
from mpidist.launcher.ranks import Seen
from mpidist.launcher.roll_call import GROUPS, called, lines, look
from tests.support import processes
from tests.support.jobs import LIMIT, each_mpi
from tests.support.minicluster import Cluster, running

PROGRAM = """
import os, signal, subprocess, sys, threading, time
import mpidist
from mpi4py import MPI

comm = mpidist.init()

def released():
    return os.path.exists(sys.argv[1] + "/" + kind)

def when_released(action):
    def wait():
        while not released():
            time.sleep(0.01)
        action()
    threading.Thread(target=wait, daemon=True).start()

def sleep():
    while not released():
        time.sleep(0.05)

def python():
    while not released():
        pass

def compiled():
    while not released():
        sum(range(5_000_000))  # holds the interpreter's lock

def lock():
    one = threading.Lock()
    one.acquire()
    when_released(one.release)
    one.acquire()

def worker():
    command = [sys.executable, "-c", "while True: pass"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    when_released(child.kill)
    child.stdout.read()

def message():
    when_released(lambda: MPI.COMM_WORLD.send(1, dest=1))
    MPI.COMM_WORLD.recv(source=1)

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def order():
    comm.timeout = part.timeout = 2.0
    first, second = (comm, part) if comm.rank == 1 else (part, comm)
    first.barrier()
    second.barrier()

part = comm.split(0)
for kind in "sleep python compiled lock worker message stopped".split():
    if comm.rank == 1:
        globals()[kind]()
    comm.barrier()
order()
"""
KINDS = ["sleep", "python", "compiled", "lock", "worker", "message", "stopped", "order"]
LINES = PROGRAM.splitlines()
BARRIER = LINES.index("    comm.barrier()") + 1


def line_of(kind):
    """The lines of a function of the program."""
    first = LINES.index(f"def {kind}():") + 1
    return range(first + 1, first + LINES[first:].index("") + 1)


def environment(tmp_path, **more):
    return processes.environment(MPIDIST_FLIGHT=str(tmp_path / "flights"), **more)


def spied(python):
    return Path(python).with_name("py-spy").exists()


@pytest.mark.long
@each_mpi
def test_hangs(tmp_path, python):
    (tmp_path / "program.py").write_text(PROGRAM)
    calls: list[list[str]] = []

    def on_line(line):
        line = line.rstrip().removeprefix("mpidist run: ")
        if line.startswith("roll call of "):
            calls.append([])
        if calls:
            calls[-1].append(line)
        # The last line of a call: the stack of the ranks that wait.
        if line.startswith("    ") and f"program.py:{BARRIER} <module>" in line:
            (tmp_path / KINDS[len(calls) - 1]).touch()
            if KINDS[len(calls) - 1] == "stopped":
                pid = re.search(r"; pid (\d+) on ", "\n".join(calls[-1]))
                os.kill(int(pid[1]), signal.SIGCONT)

    program = [str(tmp_path / "program.py"), str(tmp_path)]
    command = [python, "-m", "mpidist", "run", "-q", "--roll-call", "0.7", "-n", "3", *program]
    environ = environment(tmp_path, MPIDIST_TIMEOUT="30")
    done = processes.run(command, 100, environ, cwd=tmp_path, on_line=on_line)
    assert done.status == 1 and len(calls) >= len(KINDS), done.output
    for kind, call in zip(KINDS, calls):
        assert call[0] == "roll call of 3 ranks: no rank has moved for 0.7 s"
        assert re.match(r"world(\.1:0)?: rank", call[1]), call
        odd = next(k for k, line in enumerate(call) if line.startswith("rank 1: "))
        stack, others = call[odd + 1], call[odd + 2 + (kind == "worker") :]
        assert others[0].startswith("ranks 0, 2: in world"), call
        if kind != "order":
            assert f"program.py:{BARRIER} <module>" in others[1], call
        if kind == "stopped" and not spied(python):
            assert "state T (do_signal_stop)" in call[odd]
            assert stack == "    no stack: stopped; py-spy can read it: pip install py-spy"
            continue
        found = re.search(rf"program\.py:(\d+) {kind} < program\.py:\d+ <module>$", stack)
        assert found and int(found[1]) in line_of(kind), call
        if kind == "worker":
            assert re.match(r"    child \d+ \(python.*\): state .*, \d+ % CPU$", call[odd + 2]), (
                call
            )
        if kind == "sleep":
            # Python 3.10 sleeps in select().
            assert re.search(r"state S \((hrtimer_nanosleep|poll_schedule_time)", call[odd]), call
            assert "pid " in call[odd]
    # The deadline passes: once more, and the exception's traceback follows.
    assert "roll call of 3 ranks: a deadline has passed on rank" in done.output
    assert "hand_over" not in done.output and "failed first: CollectiveTimeout" in done.output


LATE = """
import mpidist, os, sys, time
def load():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
comm = mpidist.init()
if comm.rank == 1:
    load()
comm.barrier()
"""


@pytest.mark.long
@each_mpi
def test_on_two_nodes(tmp_path, python):
    """The monitors look; mpidist run is on a third node, and has no records."""
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "of_open_mpi").write_text("n1 slots=2\nn2 slots=2\n")
    (tmp_path / "of_mpich").write_text("n1:2\nn2:2\n")
    environ = {
        "PRTE_MCA_prte_default_hostfile": str(tmp_path / "of_open_mpi"),
        "PRTE_MCA_rmaps_default_mapping_policy": "ppr:2:node",
        "HYDRA_HOST_FILE": str(tmp_path / "of_mpich"),
        "MPIDIST_TIMEOUT": "60",
    }
    said = []

    def on_line(line):
        said.append(line.rstrip().removeprefix("mpidist run: "))
        if said[-1] == "    late.py:9 <module>":
            (tmp_path / "released").touch()

    with running(Cluster(nodes=2)) as cluster:
        program = [str(tmp_path / "late.py"), str(tmp_path / "released")]
        command = [python, "-m", "mpidist", "run", "-q", "--watch", "--roll-call", "1", "-n", "4"]
        inside = cluster.inside("head", *command, *program)
        environ = {**cluster.environment(), **environ}
        done = processes.run(inside, 100, environ, on_line=on_line)
    assert done.status == 0, said
    head = said.index("roll call of 4 ranks: no rank has moved for 1 s")  # Open MPI may warn before
    odd, stack, others = said[head + 1 : head + 4]
    assert re.match(r"rank 1: .*; pid \d+ on n1$", odd), said
    assert re.match(r"    late.py:[45] load < late.py:8 <module>$", stack), said
    assert others.startswith("ranks 0, 2-3: in world #1 barrier"), said


STEPS = """
import mpidist, numpy, time
comm = mpidist.init()
x = numpy.ones(4)
begun = time.monotonic()
for step in range(10_000):
    comm.allreduce(x, "max", out=x)
for pause in range(5):
    time.sleep(0.4)
    comm.barrier()
"""


@each_mpi  # with MPICH the ranks have monitors, with Open MPI not
def test_healthy_job(tmp_path, python):
    (tmp_path / "program.py").write_text(STEPS)
    command = [python, "-m", "mpidist", "run", "-q", "--roll-call", "1.5", "-n", "2"]
    done = processes.run([*command, str(tmp_path / "program.py")], 100, environment(tmp_path))
    assert (done.status, done.output) == (0, "")


def ask(python, words, environ, ready=2, action=lambda: None):
    """Send SIGQUIT to mpidist run once ``there`` was printed so often; return what it prints.

    And before, what the action returns.
    """
    command = [python, "-m", "mpidist", "run", "-q", "-n", "2", *words]
    pipe = subprocess.PIPE
    job = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ)
    try:
        came = ""
        while came.count("there") < ready:  # not lines: those of two ranks may be mixed
            came += job.stdout.read(1) or pytest.fail(f"only {came!r} came")
        time.sleep(0.5)  # the program is there, and perhaps not yet known to mpidist run
        told = action()
        job.send_signal(signal.SIGQUIT)
        said, again = [], 5
        while len(said) < 2 or not said[-1].startswith("mpidist run:     "):
            said.append(job.stderr.readline().rstrip())
            assert said[-1]
            # On a loaded machine a monitor may be late, or not yet there.
            if again and re.search("has not answered within |: not asked: ", said[-1]):
                said, again = [], again - 1
                time.sleep(0.5)
                job.send_signal(signal.SIGQUIT)
        job.terminate()
        job.communicate(timeout=LIMIT)
        return told, said
    finally:
        processes.end(job, environ=environ)


@pytest.mark.long
@each_mpi
def test_programs_without_mpidist(tmp_path, python):
    """Another program, and Python that does not know of mpidist, inside a shell."""
    environ = environment(tmp_path)
    _, (head, state, stack) = ask(python, ["sh", "-c", "echo there; exec sleep 60"], environ)
    assert head == "mpidist run: roll call of 2 ranks: asked for"
    assert re.search(r": ranks 0-1: state .*\d % CPU, \d.* MiB$", state)
    assert stack.startswith("mpidist run:     no stack: not a Python program")
    code = "import time\ndef work():\n    print('there', flush=True)\n    time.sleep(60)\nwork()"
    (tmp_path / "program.py").write_text(code)
    shell = f"{python} {RANK_PROGRAM} {tmp_path}/program.py; exit 3"
    words = ["sh", "-c", shell]
    _, (*_, stack) = ask(python, words, environ)
    assert re.search(r"program.py:[34] work < program.py:5 <module>$", stack)


@pytest.mark.long
def test_rollcall_of_a_running_job(tmp_path):
    (tmp_path / "program.py").write_text(
        "import mpidist, time\ncomm = mpidist.init()\ncomm.barrier()\n"
        "if comm.rank == 0:\n    print('there', flush=True)\n    time.sleep(60)\ncomm.barrier()\n"
    )
    environ = environment(tmp_path)

    def rollcall():
        command = [sys.executable, "-m", "mpidist", "rollcall"]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True)

    told, _ = ask(sys.executable, [str(tmp_path / "program.py")], environ, 1, rollcall)
    head, divergence, first, stack, other, line = told.stdout.splitlines()
    assert re.fullmatch(r"job 2\S+: roll call of 2 ranks", head)
    assert re.match(r"world: rank 0 has not begun #\d+ barrier.*; rank 1 is there$", divergence)
    assert first.startswith("rank 0: after world #") and "program.py:6 <module>" in stack
    assert other.startswith("rank 1: in world #") and "program.py:7 <module>" in line


def test_no_such_job(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_FLIGHT", str(tmp_path / "flights"))
    with pytest.raises(InvalidArgument, match="no job with records runs here"):
        called(None)
    recorder = Recorder(tmp_path / "flights" / "job", 0, 2)
    assert called("job")[-1] == "rank 1: no process here"
    recorder.words[2] = 0  # the process
    with pytest.raises(InvalidArgument, match="no process of job runs here"):
        called("job")


def test_job_that_ends_meanwhile_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_FLIGHT", str(tmp_path))
    recorder = Recorder(tmp_path / "job", 0, 2)
    monkeypatch.setattr(
        "mpidist.launcher.roll_call.jobs", lambda: [tmp_path / "gone", recorder.job]
    )
    assert called(None)[0] == "job job: roll call of 2 ranks"


@pytest.mark.parametrize("wrong", ["-1", "nan", "soon"])
def test_wrong_seconds(wrong):
    command = [sys.executable, "-m", "mpidist", "run", "--roll-call", wrong, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "'--roll-call': " in done.stderr and wrong in done.stderr


def seen(call, *frames, **facts):
    return Seen(7, "S", call=call, frames=list(frames), **facts)


def test_groups():
    ranks = {rank: seen("in #8", "a.py:4 f") for rank in range(8)}
    ranks[2] = seen("after #7", "b.py:1 g", cpu=99.7, memory=3 << 20, workers=["9 (sh) 50 % CPU"])
    ranks[3] = seen("in #8", "a.py:9 h", "a.py:4 f", since="waiting since 9:00")
    ranks[5] = seen("in #8", memory=1 << 20)  # without a stack
    assert lines(ranks, {2: "n2"}) == [
        "rank 2: after #7; state S, 100 % CPU, 3 MiB; pid 7 on n2",
        "    b.py:1 g",
        "    child 9 (sh) 50 % CPU",
        "rank 3: in #8, waiting since 9:00; state S, 0 % CPU, 0 MiB; pid 7",
        "    a.py:9 h < a.py:4 f",
        "ranks 0-1, 4-7: in #8; state S, 0 % CPU, 0 to 1 MiB",
        "    a.py:4 f",
    ]


def test_of_two_the_one_outside_a_call_comes_first():
    found = lines({0: seen("in #8", since="s"), 1: seen("after #7", why="stopped")}, {})
    assert [line.partition(";")[0] for line in found] == [
        "rank 1: after #7",
        "    no stack: stopped",
        "rank 0: in #8, s",
    ]


def test_a_stopped_rank_is_apart():
    ranks = {rank: seen("in #8", "a.py:4 f") for rank in range(3)}
    ranks[2].state = "T (do_signal_stop)"
    first, _, others, _ = lines(ranks, {})
    assert first.startswith("rank 2: in #8; state T (do") and others.startswith("ranks 0-1: in #8")


def test_those_that_wait_for_others_come_last():
    """In a message too; and of ranks that all wait, the fewest come first."""
    ranks = {rank: seen("after #7", "a.py:3 f") for rank in range(3)}
    ranks[3] = seen("in #8", "a.py:4 f")
    ranks[4] = seen("after #7", "a.py:5 f", since="waiting since 9:00 in a.py:5")
    heads = [line.partition(":")[0] for line in lines(ranks, {}) if line[0] != " "]
    assert heads == ["ranks 0-2", "rank 4", "rank 3"]
    ranks[5] = seen("in #8", "a.py:4 f")
    heads = [line.partition(":")[0] for line in lines(ranks, {}) if line[0] != " "]
    assert heads == ["ranks 0-2", "rank 4", "ranks 3, 5"]


def test_many_groups_are_cut():
    found = lines({rank: seen(f"in #{rank}") for rank in range(GROUPS + 5)}, {})
    assert found[-1] == f"ranks {GROUPS}-{GROUPS + 4}: in 5 more groups"
    assert len(found) == GROUPS + 1


def test_a_process_that_has_ended():
    child = subprocess.Popen(["true"])
    child.wait()
    (found,) = look({child.pid: ""})
    assert found.state == "has ended" and found.why and not found.frames
