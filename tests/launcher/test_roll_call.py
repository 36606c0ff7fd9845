"""The roll call: of running jobs, processes and made-up ranks; those that hang: test_hangs.py."""

import re
import signal
import subprocess
import sys
import time

import pytest

from mpidist.backends.recorder import Recorder
from mpidist.communicator.launcher_notes import SPARE
from mpidist.errors import InvalidArgument
from mpidist.launcher.program import RANK_PROGRAM
from mpidist.launcher.ranks import Seen
from mpidist.launcher.roll_call import GROUPS, called, lines, look
from tests.support import processes
from tests.support.jobs import LIMIT, each_mpi


def environment(tmp_path, **more):
    return processes.environment(MPIDIST_FLIGHT=str(tmp_path / "flights"), **more)


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
    ranks[6] = seen(f"after md.elastic {SPARE}", "a.py:9 train")  # for a loss
    heads = [line.partition(":")[0] for line in lines(ranks, {}) if line[0] != " "]
    assert heads == ["ranks 0-2", "rank 4", "ranks 3, 5", "rank 6"]


def test_many_groups_are_cut():
    found = lines({rank: seen(f"in #{rank}") for rank in range(GROUPS + 5)}, {})
    assert found[-1] == f"ranks {GROUPS}-{GROUPS + 4}: in 5 more groups"
    assert len(found) == GROUPS + 1


def test_a_process_that_has_ended():
    child = subprocess.Popen(["true"])
    child.wait()
    (found,) = look({child.pid: ""})
    assert found.state == "has ended" and found.why and not found.frames
