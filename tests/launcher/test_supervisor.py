"""A supervised job, on this machine; a shell stands for the launcher."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from mpidist.launcher import supervisor
from mpidist.launcher.notes import Notes
from mpidist.launcher.program import RANK_PROGRAM
from mpidist.launcher.ranks import Seen
from tests.support import processes
from tests.support.launcher_kits import (
    KINDS,
    RANK,
    python,
    rank_program,
    supervised,
)
from tests.support.processes import environment, run


@pytest.mark.parametrize(
    ("program", "status", "told"),
    [
        ("print('all well')", 0, "0: all well"),
        ("import sys; sys.exit(3)", 3, "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", 137, "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_run_each_end_is_told(tmp_path, program, status, told):
    (tmp_path / "program.py").write_text(program)
    words = ["-m", "mpidist", "run", "-n", "2", "--label", str(tmp_path / "program.py")]
    done = run([sys.executable, *words], 200, environment())
    assert done.status == status and told in done.output, done.output


def test_run_log_of_the_failed_rank_is_named(tmp_path):
    (tmp_path / "program.py").write_text("print('why'); raise SystemExit(3)")
    words = ["-m", "mpidist", "run", "-n", "1", "--log-dir", str(tmp_path)]
    done = run([sys.executable, *words, str(tmp_path / "program.py")], 200, environment())
    (line,) = (line for line in done.output.splitlines() if "ended with exit code 3" in line)
    assert done.status == 3 and line.endswith(f"; its log: {tmp_path}/rank-00000.log")
    assert (tmp_path / "rank-00000.log").read_text() == "why\n"


@pytest.mark.parametrize("kind", KINDS)
def test_signal_goes_to_the_launcher(kind):
    """Not of a terminal: the launcher has not got it, and is sent it."""
    watch = supervised(0, kind)
    assert watch.run(["sh", "-c", "kill -TERM $PPID; exec sleep 600"], environment()) == 143


@pytest.mark.parametrize("kind", KINDS)
def test_launcher_does_not_get_the_quit_of_a_terminal(kind, capfd):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    gets = python("import os, signal; os.kill(os.getpid(), signal.SIGQUIT); print('lives')")
    assert supervised(0, kind).run(gets, environment()) == 0
    assert capfd.readouterr().out == "lives\n"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_launcher_stays_after_success_is_ended(monkeypatch, capfd):
    """All ranks finished well, so this is no failure; but nobody waits for it for ever."""
    monkeypatch.setattr(supervisor, "ENDS_WITHIN", 0.2)
    watch = supervised(1)
    words = watch.reports.command(["true"])
    assert watch.run(["sh", "-c", '"$@"; exec sleep 600', "sh", *words], RANK) == 0
    assert (
        "all ranks ended 0.2 s ago, but the launcher still runs: ending it"
        in capfd.readouterr().err
    )


def test_launcher_stays_after_a_failure_is_ended(monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "PATIENCE", 0.2)
    watch = supervised(1)
    words = watch.reports.command(["sh", "-c", "exit 3"])
    assert watch.run(["sh", "-c", '"$@"; exec sleep 600', "sh", *words], RANK) == 3
    assert "has not ended the job within 0.2 s: ending it" in capfd.readouterr().err


DEAF = """
import os, pathlib, signal, sys, time
deaf = pathlib.Path(sys.argv[1])
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    while not deaf.exists():
        time.sleep(0.02)
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf.touch()
time.sleep(600)
"""


def test_ranks_left_after_a_failure_are_killed(tmp_path, monkeypatch):
    """One that does not hear SIGTERM; the launcher ends by itself then."""
    monkeypatch.setattr(supervisor, "PATIENCE", 0.2)
    monkeypatch.setattr(supervisor, "STEP", 0.5)
    watch = supervised(2)
    words = watch.reports.command([*python(DEAF), f"{tmp_path}/deaf"])
    both = """OMPI_COMM_WORLD_RANK=0 "$@" & OMPI_COMM_WORLD_RANK=1 "$@"; wait; exit 0"""
    assert watch.run(["sh", "-c", both, "sh", *words], environment()) == 3
    assert sorted(rank.status for rank in watch.ended) == [-signal.SIGKILL, 3]


def test_kill_wait_steps_fit_into_it(monkeypatch):
    """After SIGTERM the steps to the end fit into the time that is left."""
    deaf = ["sh", "-c", "trap '' TERM; kill -TERM $PPID; sleep 600 & wait; sleep 600"]
    seconds = []
    for _ in range(4):  # on a loaded machine, one of them is in time
        begun = time.monotonic()
        assert supervised(0, kill_wait=2.0).run(deaf, environment()) == 137
        seconds.append(time.monotonic() - begun)
        if seconds[-1] < 10:
            break
    assert min(seconds) < 10, seconds  # 8 s and three steps of 3 s otherwise


INIT = """
import sys, time
from mpidist.communicator.launcher_notes import send_note
if sys.argv[1] != "early":
    send_note(mpi="starting")
if sys.argv[1] == "through":
    send_note(mpi="started")
    time.sleep(0.5)
elif sys.argv[1] == "hangs":
    time.sleep(600)
sys.exit(sys.argv[1] != "through")
"""


@pytest.mark.parametrize(
    ("ranks", "how", "status", "never", "told"),
    [
        (1, "hangs", 1, True, "1 of 1 ranks (0) have been in MPI_Init for 0.2 s (--start-timeout)"),
        (1, "aborts", 1, True, "rank 0 on "),
        (1, "early", 1, False, "rank 0 on "),
        (1, "through", 0, False, ""),
        (2, "through", 1, False, "of 2 ranks 1 did not report"),  # it never came
    ],
)
def test_mpi_init_that_fails_is_told(monkeypatch, capfd, ranks, how, status, never, told):
    """As MPICH under SLURM's pmi2, now and then; a rank that is late is waited for."""
    if ranks == 2:  # the report that never comes
        monkeypatch.setattr(supervisor, "LAST_REPORTS", 0.5)
    watch = supervised(ranks, start_timeout=0.2 if how == "hangs" else 100.0)
    words = watch.reports.command([sys.executable, "-c", INIT, how])
    assert watch.run(words, RANK) == status
    assert watch.never_started == never and told in capfd.readouterr().err


def test_mpi_init_rank_that_ended_before_is_not_waited_for(capfd):
    """It will not enter MPI_Init any more: the others are not waited for."""
    watch = supervised(2, start_timeout=0.5)
    words = watch.reports.command(python(INIT)[:1])
    one = """export OMPI_COMM_WORLD_RANK=0; "$@" -c "$INIT" hangs &
    OMPI_COMM_WORLD_RANK=1 "$@" -c pass; wait; exit 1"""
    assert watch.run(["sh", "-c", one, "sh", *words], environment(INIT=INIT)) == 1
    said = capfd.readouterr().err
    assert "rank 1 on " in said and "ended with exit code 0 before MPI_Init" in said, said
    assert "1 of 2 ranks (0) have been in MPI_Init" in said and not watch.never_started


LEAVES = """
import os, time
from mpidist.communicator.launcher_notes import send_note
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    assert send_note(exit=3)
time.sleep(600)
"""


def test_lost_rank_with_announced_exit_code_has_it(tmp_path, capfd, monkeypatch):
    """As in MPICH's MPI_Abort: the launcher kills all ranks with their monitors, in any order."""
    monkeypatch.setattr(supervisor, "CAUSE_WITHIN", 100)
    watch = supervised(2)
    take = watch._take

    def taken(rank, report):
        take(rank, report)
        if report.exit == 3:
            (tmp_path / "left").touch()

    monkeypatch.setattr(watch, "_take", taken)
    words = watch.reports.command(python(LEAVES))
    kills = f"""export OMPI_COMM_WORLD_RANK=0; "$@" & first=$!
    export OMPI_COMM_WORLD_RANK=1; "$@" & second=$!
    while [ ! -e {tmp_path}/left ]; do sleep 0.05; done
    kill -9 $first; sleep 0.5; kill -9 $second; exit 7"""
    assert watch.run(["sh", "-c", kills, "sh", *words], environment()) == 3
    said = capfd.readouterr().err
    assert "rank 1 on " in said and "ended with exit code 3" in said and "lost" not in said, said


def test_silent_rank_is_not_named_for_the_code_of_another(tmp_path, capfd):
    """It ended first, for the launcher of MPICH ends a job before it lets go of who caused that."""
    program = (
        "import os, sys\nos.kill(os.getpid(), 15) if os.environ['RANK'] == '0' else sys.exit(7)"
    )
    words = ["env", "RANK=0", *rank_program(tmp_path, program)]
    both = '"$@"; shift 2; RANK=1 OMPI_COMM_WORLD_RANK=1 exec "$@"'
    assert supervised(2, Notes).run(["sh", "-c", both, "sh", *words], RANK) == 7
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"mpidist run: rank 1 on {socket.gethostname()} ended with exit code 7"


@pytest.mark.parametrize("settled", [100.0, -1.0], ids=["at the end", "before"])
def test_last_line_names_the_rank_also_before_a_late_traceback(tmp_path, capfd, settled):
    """Rank 1 just exits, which is printed at once; the exception of rank 0 follows."""
    watch = supervised(2)
    program = f"""import os, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    sys.exit(7)
while "code 7" not in open("{tmp_path}/said").read():
    time.sleep(0.05)
class RankFailed(Exception): pass
raise RankFailed("rank 0: rank 1 has left")
"""
    words = watch.reports.command(rank_program(tmp_path, program))
    both = """OMPI_COMM_WORLD_RANK=1 "$@" & OMPI_COMM_WORLD_RANK=0 "$@"; wait; exit 7"""
    with open(tmp_path / "said", "w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "say", lambda line: print(line, file=file, flush=True))
        patch.setattr(supervisor, "PATIENCE", 100)
        patch.setattr("mpidist.launcher.failures.SETTLED", settled)
        assert watch.run(["sh", "-c", both, "sh", *words], environment()) == 7
    told = (tmp_path / "said").read_text().splitlines()
    assert "RankFailed: rank 0: rank 1 has left" in capfd.readouterr().err
    host = socket.gethostname()
    assert told[:2] == [f"rank 1 on {host} ended with exit code 7"] * 2
    assert told[2:] == [f"and rank 0 on {host} ended with exit code 1"]


def test_exception_is_printed_while_the_job_goes_on(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("mpidist.launcher.failures.SETTLED", 0.1)
    words = rank_program(tmp_path, "1 / 0")
    # This standard error is a file; the launcher stays until the exception stands in it.
    printed = f""""$@"; k=0
    until grep -q ZeroDivisionError /proc/{os.getpid()}/fd/2 || [ $k = 2000 ]; do
        k=$((k + 1)); sleep 0.05
    done
    echo the last >&2; exit 1"""
    assert supervised(1, Notes).run(["sh", "-c", printed, "sh", *words], RANK) == 1
    told = capfd.readouterr().err.splitlines()
    assert told.index("ZeroDivisionError: division by zero") < told.index("the last")
    assert told[-1].endswith("failed first: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("code", "within"), [(3, "PATIENCE"), (0, "ENDS_WITHIN")])
def test_launcher_stays_after_all_ranks_is_ended(tmp_path, capfd, monkeypatch, code, within):
    """All ranks are gone, and it does not end: the exit code is that of the ranks."""
    monkeypatch.setattr(supervisor, within, 0.2)
    words = rank_program(tmp_path, f"raise SystemExit({code})")
    stays = ["sh", "-c", '"$@"; exec sleep 600', "sh", *words]
    assert supervised(1, Notes).run(stays, RANK) == code
    assert "all ranks ended 0.2 s ago, but the launcher still runs" in capfd.readouterr().err


UNTIL = "k=0; until [ -e {} ] || [ $k = 1000 ]; do k=$((k + 1)); sleep 0.05; done"
UNTIL_ASKED, UNTIL_SAID = UNTIL.format("asked"), UNTIL.format("said")


def test_roll_call_that_fails_is_told(tmp_path, capfd, monkeypatch):
    def fails(self, launcher):
        (tmp_path / "asked").touch()
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Notes, "ask", fails)
    watch = supervised(0, Notes)
    with watch.signals.recorded(signal.SIGQUIT):
        assert watch.run(["sh", "-c", f"kill -QUIT $PPID; {UNTIL_ASKED}"], environment()) == 0
    assert "mpidist run: roll call: UnicodeDecodeError: 'utf-8'" in capfd.readouterr().err


LATE = """
from mpidist.communicator.launcher_notes import send_note
assert send_note(late=True)
"""


@pytest.mark.parametrize(
    ("script", "answers", "why", "told"),
    [
        # What was answered in time is printed before the ranks go on to end the job.
        (
            f'k=0; "$@" -c "$LATE"; {UNTIL_SAID}',
            {0: Seen(7, "S", call="in #8"), 1: None},
            "a deadline has passed on rank 0",
            ["rank 0: in #8; state S, 0 % CPU, 0 MiB; pid 7", "rank 1: its monitor has not answer"],
        ),
        # A rank that has ended well will not answer.
        (
            f'"$@" -c pass; sleep 0.3; kill -QUIT $PPID; {UNTIL_SAID}',
            {0: None},
            "asked for",
            ["rank 0: ended with exit code 0"],
        ),
        # The launcher has ended: nobody will.
        (
            f"kill -QUIT $PPID; {UNTIL_ASKED}",
            {0: None},
            "asked for",
            ["rank 0: its monitor has not"],
        ),
    ],
    ids=["late", "ended", "last"],
)
def test_roll_call_with_a_silent_rank(tmp_path, monkeypatch, script, answers, why, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "ANSWERS_WITHIN", 600)
    said = []

    def ask(self, launcher):
        (tmp_path / "asked").touch()
        return dict(answers)

    def say(line):
        said.append((line, (tmp_path / "ended").exists()))
        (tmp_path / "said").touch()

    monkeypatch.setattr(Notes, "ask", ask)
    monkeypatch.setattr(supervisor, "say", say)
    watch = supervised(len(answers), Notes)
    command = ["sh", "-c", f"{script}; touch ended", "sh", sys.executable, RANK_PROGRAM]
    with watch.signals.recorded(signal.SIGQUIT):
        assert watch.run(command, environment(**RANK, LATE=LATE)) == 0
    lines = [line for line, _ in said[: 1 + len(told)]]
    assert lines[0] == f"roll call of {len(answers)} rank{'s' * (len(answers) > 1)}: {why}", said
    assert all(map(str.startswith, lines[1:], told)), lines
    assert said[0][1] == (script[:4] == "kill"), "too late"


KILLED = """
import os
from tests.support.launcher_kits import Notes, supervised
supervised(1, Notes).run(["sh", "-c", "echo $$; exec sleep 600"], os.environ)
"""


def test_launcher_ends_with_mpidist_run():
    words = [sys.executable, "-c", KILLED]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as job:
        launcher = int(job.stdout.readline())
        os.kill(job.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while processes.stat(launcher)[:1] not in ([], ["Z"]):
        assert time.monotonic() < until, "the launcher is still there"
        time.sleep(0.02)
