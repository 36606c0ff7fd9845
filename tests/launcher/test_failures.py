"""The exceptions that end ranks are printed once; a shell or a rank stands for the launcher."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mpidist.communicator.launcher_notes import LONGEST, NOTES
from mpidist.launcher import plain
from mpidist.launcher.command_line import RANK_PROGRAM, reporting
from mpidist.launcher.connections import RankState
from mpidist.launcher.failures import Failures, ranks_listed
from mpidist.launcher.plain import PlainJob
from mpidist.launcher.watch import JobWatch
from tests.support import processes
from tests.support.jobs import each_mpi
from tests.support.processes import environment, run

RANK = {**environment(), "OMPI_COMM_WORLD_RANK": "0"}
SAME = """import os, pathlib, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
sys.stdout.write(f"begin {rank}\\n")
pathlib.Path(f"came-{rank}").touch()
until = time.monotonic() + 100
while len(list(pathlib.Path().glob("came-*"))) < 4 and time.monotonic() < until:
    time.sleep(0.01)
{}["other" if rank == 2 else "same"]
"""


@each_mpi
def test_equal_tracebacks_are_printed_once(python, tmp_path):
    """Those of a program that imports neither mpidist nor mpi4py, too."""
    (tmp_path / "fails.py").write_text(SAME)
    words = [python, "-m", "mpidist", "run", "-n", "4", "fails.py"]
    done = run(words, 200, environment(), cwd=tmp_path)
    lines = done.output.splitlines()
    assert done.status == 1, done.output
    who = [line for line in lines if "failed; the job ends" in line]
    assert sorted(who) == [
        "rank 2 of 4 failed; the job ends",
        "ranks 0-1, 3 of 4 failed; the job ends",
    ], done.output
    assert done.output.count("Traceback") == 2 and "KeyError: 'other'" in lines
    assert not any(name in done.output for name in ("runpy", "mpi4py/run.py", "rank_program.py"))
    assert sorted(line for line in lines if line.startswith("begin")) == [
        f"begin {rank}" for rank in range(4)
    ]
    first = "other" if who[0].startswith("rank 2") else "same"
    assert lines[-1].startswith("mpidist run: rank "), done.output
    assert f"on {socket.gethostname()} failed first: KeyError: {first!r}" in lines[-1]


ENDS = """import os, signal, sys
import mpidist
comm = mpidist.init(timeout={})
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


def test_lists_of_ranks():
    assert ranks_listed([3]) == "rank 3" and ranks_listed([4, 0, 1, 2]) == "ranks 0-2, 4"


def test_commands_that_report():
    python = sys.executable
    for given, started in (
        (["-m", "mpi4py", "a.py", "-m"], [RANK_PROGRAM, "a.py", "-m"]),
        (["-u", "-W", "error", "-m", "pkg"], ["-u", "-W", "error", RANK_PROGRAM, "--no-abort"]),
        (["-V"], ["-V"]),
    ):
        assert reporting([python, *given])[1 : 1 + len(started)] == started
    assert reporting(["echo", "-m", "mpi4py"]) == ["echo", "-m", "mpi4py"]


def rank_program(tmp_path, text):
    (tmp_path / "program.py").write_text(text)
    return [sys.executable, RANK_PROGRAM, str(tmp_path / "program.py")]


@pytest.mark.parametrize(
    ("program", "status", "told"),
    [
        ("import sys; sys.exit('a reason')", 1, "rank 0 on {} ended with exit code 1"),
        ("import sys; sys.exit(3)", 3, "rank 0 on {} ended with exit code 3"),
        ("import os; os._exit(5)", 5, "rank 0 on {} ended with exit code 5"),
        ("import os; os.kill(os.getpid(), 9)", 137, "rank 0 on {} was killed by signal 9"),
        ("def f(): f()\nf()", 1, "rank 0 on {} failed first: RecursionError: maximum"),
        (f"raise ValueError('7' * {LONGEST})", 1, "rank 0 on {} ended with exit code 1"),
        ("import os\nif not os.fork(): 1 / 0\nos.wait()", 0, ""),  # not this rank
        ("print('well')", 0, ""),
    ],
)
def test_how_a_rank_ended(tmp_path, capfd, program, status, told):
    assert PlainJob(1).run(rank_program(tmp_path, program), RANK) == status
    lines = [x for x in capfd.readouterr().err.splitlines() if x.startswith("mpidist run: rank")]
    if told:
        assert len(lines) == 1 and told.format(socket.gethostname()) in lines[0]
    else:
        assert not lines


def test_a_rank_without_an_exit_code_is_not_named_for_that_of_another(tmp_path, capfd):
    """It ended first, for the launcher of MPICH ends a job before it lets go of who caused that."""
    program = (
        "import os, sys\nos.kill(os.getpid(), 15) if os.environ['RANK'] == '0' else sys.exit(7)"
    )
    words = ["env", "RANK=0", *rank_program(tmp_path, program)]
    both = '"$@"; shift 2; RANK=1 OMPI_COMM_WORLD_RANK=1 exec "$@"'
    assert PlainJob(2).run(["sh", "-c", both, "sh", *words], RANK) == 7
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"mpidist run: rank 1 on {socket.gethostname()} ended with exit code 7"


def test_a_module_runs_as_by_python(tmp_path, capfd, monkeypatch):
    """With the folder and arguments that it has without mpidist run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "import sys\nprint(__name__, *sys.argv, repr(sys.path[0]), flush=True)\nsys.exit(1 / 0)"
    )
    words = [sys.executable, "-m", "own", "-m", "x"]
    alone = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert PlainJob(2).run(reporting(words), RANK) == 1
    told = capfd.readouterr()
    assert told.out == alone.stdout and "-m x" in told.out
    last = told.err.splitlines()[-1]  # the other rank is perhaps on another host
    assert "rank 0 on " in last and last.endswith(" failed: ZeroDivisionError: division by zero")


def test_an_exception_that_nobody_takes_is_printed(tmp_path):
    """No mpidist run, it is gone, or it ends while the rank waits for others; or too long."""
    words = rank_program(tmp_path, "import sys; raise ValueError('7' * int(sys.argv[1]))")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taker:
        taker.bind("\0mpidist-test")
        taker.settimeout(100)

        def take():
            while b"failure" not in taker.recv(LONGEST):
                pass
            taker.close()

        guest = threading.Thread(target=take)
        guest.start()
        for name in ("", "mpidist-nobody", "mpidist-test"):
            told = subprocess.run(
                [*words, "3"],
                env={**RANK, NOTES: name},
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert told.returncode == 1 and told.stderr.count("ValueError: 777") == 1, name
            assert told.stderr.count("File") == 1, told.stderr
        guest.join()
    program = ["-m", "mpidist", "run", "-n", "1", "program.py", str(LONGEST)]
    told = run([sys.executable, *program], 200, environment(), cwd=tmp_path)
    assert told.output.count("ValueError: 777") == 1


def test_the_log_has_the_traceback(tmp_path, capfd):
    watch = JobWatch(1, logs=str(tmp_path))
    assert watch.run(watch.command(rank_program(tmp_path, "print(1)\n1 / 0")), RANK) == 1
    log = (tmp_path / "rank-00000.log").read_text()
    told = capfd.readouterr().err.splitlines()
    lines = log.splitlines()  # in either order: the exception comes by another way than the output
    assert lines.count("1") == lines.count("ZeroDivisionError: division by zero") == 1
    assert told.count("ZeroDivisionError: division by zero") == 1
    assert told[-1].endswith(f"division by zero; its log: {tmp_path}/rank-00000.log")


def test_exceptions_are_printed_while_the_job_goes_on(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("mpidist.launcher.failures.SETTLED", 0.1)
    words = rank_program(tmp_path, "1 / 0")
    # This standard error is a file; the launcher stays until the exception stands in it.
    printed = f""""$@"; k=0
    until grep -q ZeroDivisionError /proc/{os.getpid()}/fd/2 || [ $k = 2000 ]; do
        k=$((k + 1)); sleep 0.05
    done
    echo the last >&2; exit 1"""
    assert PlainJob(1).run(["sh", "-c", printed, "sh", *words], RANK) == 1
    told = capfd.readouterr().err.splitlines()
    assert told.index("ZeroDivisionError: division by zero") < told.index("the last")
    assert told[-1].endswith("failed first: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("code", "within"), [(3, "PATIENCE"), (0, "ENDS_WITHIN")])
def test_a_launcher_that_stays(tmp_path, capfd, monkeypatch, code, within):
    """All ranks are gone, and it does not end: the exit code is that of the ranks."""
    monkeypatch.setattr(plain, within, 0.2)
    words = rank_program(tmp_path, f"raise SystemExit({code})")
    assert PlainJob(1).run(["sh", "-c", '"$@"; exec sleep 600', "sh", *words], RANK) == code
    assert "all ranks ended 0.2 s ago, but the launcher still runs" in capfd.readouterr().err


KILLED = """
import os
from mpidist.launcher.plain import PlainJob
PlainJob(1).run(["sh", "-c", "echo $$; exec sleep 600"], os.environ)
"""


def test_the_launcher_ends_with_mpidist_run():
    words = [sys.executable, "-c", KILLED]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as job:
        launcher = int(job.stdout.readline())
        os.kill(job.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while processes.stat(launcher)[:1] not in ([], ["Z"]):
        assert time.monotonic() < until, "the launcher is still there"
        time.sleep(0.02)
