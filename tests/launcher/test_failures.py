"""The exceptions that end ranks are printed once; a shell or a rank stands for the launcher."""

import itertools
import re
import signal
import socket

import pytest

from mpidist.launcher.failures import Failures, ranks_listed
from mpidist.launcher.ranks import RankState
from tests.support.jobs import each_mpi
from tests.support.launcher_kits import monitored, python, supervised
from tests.support.processes import environment, run


def test_print_escapes_control_characters(capfd):
    text = "raise SystemError('\\x1b]0;pwned\\x07')"
    tell = (
        "from mpidist.communicator.launcher_notes import send_note\n"
        "send_note(failure={'kind': 'X', 'line': 'a\\x1b]0;b', 'text': 'c\\x1b]0;d'})\n"
    )
    watch = supervised(1)
    monitored(watch, *python(tell + text))
    said = capfd.readouterr().err
    assert "\\x1b]0;d" in said and "failed first: a\\x1b]0;b" in said and "\x1b]0;d" not in said


SAME = """import os, pathlib, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
sys.stdout.write(f"begin {rank}\\n")
pathlib.Path(f"came-{rank}").touch()
until = time.monotonic() + 100
def wait_for(paths, sleep=time.sleep):
    while len(list(pathlib.Path().glob(paths))) < 4 and time.monotonic() < until:
        sleep(0.01)
def sleep(_):  # in place of a moment for the others, when this rank has told its exception
    pathlib.Path(f"told-{rank}").touch()
    wait_for("told-*")
wait_for("came-*")
time.sleep = sleep
{}["other" if rank == 2 else "same"]
"""


@each_mpi
def test_equal_tracebacks_are_printed_once(python, tmp_path):
    """Those of a program that imports neither mpidist nor mpi4py, too."""
    (tmp_path / "fails.py").write_text(SAME)
    words = [python, "-m", "mpidist", "run", "-q", "-n", "4", "fails.py"]
    done = run(words, 200, environment(), cwd=tmp_path)
    lines = done.output.splitlines()
    assert done.status == 1, done.output
    # "alike" are those whose monitors were late.
    how = "; the job ends| alike: KeyError: 'same'"
    who = re.findall(rf"^ranks? (.*) of 4 failed(?:{how})$", done.output, re.MULTILINE)
    ends = [part.split("-") for part in ", ".join(who).split(", ")]
    named = [rank for each in ends for rank in range(int(each[0]), int(each[-1]) + 1)]
    assert "2" in who and sorted(named) == [0, 1, 2, 3], done.output
    assert done.output.count("Traceback") == 2 and "KeyError: 'other'" in lines
    assert not any(name in done.output for name in ("runpy", "mpi4py/run.py", "rank_program.py"))
    assert sorted(line for line in lines if line.startswith("begin")) == [
        f"begin {rank}" for rank in range(4)
    ]
    first = "other" if who[0] == "2" else "same"
    assert lines[-1].startswith("mpidist run: rank "), done.output
    assert f"on {socket.gethostname()} failed first: KeyError: {first!r}" in lines[-1]


ENDS = """import os, signal, sys
import mpidist
comm = mpidist.init(timeout={})
# The launcher may be slow to end the others.
sys.modules["mpidist.communicator.launch"].LAUNCHER_ENDS_WITHIN = 20.0
if comm.rank == 1:
    {}
comm.barrier()
"""


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize(
    ("how", "timeout", "status"),
    [
        ("raise KeyError(1)", 60, 1),
        ("import time; time.sleep(30)", 1, 1),  # rank 0 raises CollectiveTimeout
        ("sys.exit(7)", 60, 7),
        # Open MPI 4 takes a second to see it.
        ("os.kill(os.getpid(), signal.SIGTERM)", 60, 128 + signal.SIGTERM),
    ],
)
def test_the_exit_code(python, how, timeout, status, tmp_path):
    """That of an exception is 1 with every launcher: MPICH's ranks end by SIGTERM then."""
    (tmp_path / "ends.py").write_text(ENDS.format(timeout, how))
    words = [python, "-m", "mpidist", "run", "-n", "2", "ends.py"]
    done = run(words, 90, environment(), cwd=tmp_path)
    assert done.status == status, done.output


@each_mpi
@pytest.mark.parametrize("watch", ["--watch", "--no-watch"])
def test_the_last_line_names_the_rank(python, watch, tmp_path):
    """No box of the launcher follows, and no rank is named that the launcher has ended."""
    (tmp_path / "ends.py").write_text(ENDS.format(60, "sys.exit(7)"))
    words = [python, "-m", "mpidist", "run", watch, "-n", "2", "ends.py"]
    done = run(words, 90, environment(), cwd=tmp_path)
    last = f"mpidist run: rank 1 on {socket.gethostname()} ended with exit code 7"
    assert done.output.splitlines()[-1] == last, done.output


def described(line, text=""):
    return {"kind": line.partition(":")[0], "line": line, "text": f"Traceback …\n{text}{line}\n"}


def test_what_follows_a_failure_is_one_line(capfd):
    """It may arrive first; a message that begins with the own rank is equal on all ranks."""
    failures = Failures(6)
    for rank in (1, 2):
        failures.add(rank, "a", described(f"RankFailed: rank {rank}: rank 0 has left"))
    failures.add(0, "b", described("ValueError: 7"))
    failures.print()
    failures.add(4, "a", described("ValueError: 7"))
    for rank in (3, 5):  # of rank 3, on all
        failures.add(rank, "a", described("KeyError: rank 3: value"))
    failures.print_settled()  # not yet
    failures.print()
    assert capfd.readouterr().err.splitlines() == [
        "rank 0 of 6 failed; the job ends",
        "Traceback …",
        "ValueError: 7",
        "ranks 1-2 of 6 failed: RankFailed: rank 0 has left",
        "rank 4 of 6 failed alike: ValueError: 7",
        "ranks 3, 5 of 6 failed; the job ends",
        "Traceback …",
        "KeyError: rank 3: value",
    ]
    assert str(failures.cause([])) == "rank 0 on b failed first: ValueError: 7"
    long = Failures(1)
    long.add(0, "b", described(f"ValueError: {'7' * 1000}"))
    assert len(str(long.cause([]))) < 200


def test_the_cause_of_what_follows():
    failures = Failures(3)
    failures.add(1, "a", described("CollectiveTimeout: rank 1: rank 0 not arrived"))
    ended = RankState(1, "a", 1), RankState(2, "a", -15)  # the launcher has ended rank 2
    first = "rank 1 on a failed first: CollectiveTimeout: rank 0 not arrived"
    assert str(failures.cause(ended)) == first
    for state, how in (
        (RankState(0, "a", -9), "was killed by signal 9 (SIGKILL)"),
        (RankState(0, "a", -15, left=5), "ended with exit code 5"),
    ):
        assert str(failures.cause([*ended, state])) == f"rank 0 on a {how}"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_names_the_cause_may_arrive_before_it(capfd, order):
    """Rank 1 misses a deadline and tells the others before its own exception is on its way."""
    failures, late = Failures(3), "CollectiveTimeout: rank 1: recv from rank 0 not finished"
    told = [f"CommunicatorBroken: rank {rank}: rank 1 has failed" for rank in (0, 2)]
    for rank in order:
        failures.add(rank, "a", described([told[0], late, told[1]][rank]))
    first = "rank 1 on a failed first: CollectiveTimeout: recv from rank 0 not finished"
    assert str(failures.cause([])) == first
    failures.print()
    assert capfd.readouterr().err.splitlines() == [
        "rank 1 of 3 failed; the job ends",
        "Traceback …",
        late,
        "ranks 0, 2 of 3 failed: CommunicatorBroken: rank 1 has failed",
    ]


def test_lists_of_ranks():
    assert ranks_listed([3]) == "rank 3" and ranks_listed([4, 0, 1, 2]) == "ranks 0-2, 4"
