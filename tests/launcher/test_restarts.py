"""mpidist run --max-restarts: a job goes on from memory, whichever MPI it has."""

import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpidist.launcher import restarts
from mpidist.launcher.failures import Failure
from mpidist.launcher.ranks import RankState
from mpidist.launcher.restarts import Restarts
from mpidist.recovery.records import Ranks
from tests.support import elastic_chaos, processes
from tests.support.how_long import takes_minutes
from tests.support.jobs import LIMIT, ROOT, each_mpi, tolerant

STEPS = 40
needs_ulfm = pytest.mark.skipif(not tolerant(), reason="needs Open MPI")


def train(wrapper, kills="", python=sys.executable, restarts=4, how="kill", **options):
    """Run a job; return what became of it, and what its ranks said at the end."""
    options = {"ranks": 3, "steps": STEPS, "spares": 0, "survive": False, **options}
    finished, _, done = elastic_chaos.train(
        wrapper, restarts=restarts, python=python, KILL=kills, HOW=how, **options
    )
    assert not finished.timed_out, finished.output
    return finished, done


@each_mpi
@pytest.mark.parametrize(
    "wrapper",
    ["numpy", "rows", *(pytest.param(w, marks=pytest.mark.long) for w in ("nn", "pipeline"))],
)
def test_killed_job_ends_with_the_bits_of_an_undisturbed_one(undisturbed, wrapper, python):
    """Killed also before the second start has committed anything."""
    before = folders()
    finished, done = train(wrapper, "1:after:20:0 0:before:1:1 2:stepped:6:2", python)
    assert finished.status == 0 and not left(before), finished.output
    assert done == [undisturbed(wrapper, STEPS, python=python)] * 3, finished.output
    begins = "mpidist run: start "
    said = [line[13:] for line in finished.output.splitlines() if line.startswith(begins)]
    assert said[:2] == [f"start {n} of 5, from step 19 in memory" for n in (2, 3)]
    for rank in (0, 1, 2):  # each cause is printed once, and again only after what came late
        _, *again, _ = re.split(rf"run: rank {rank} on \S+ was killed", finished.output)
        assert len(again) < 2 and all(" of 3 failed" in late for late in again), finished.output
    assert said[2] in [f"start 4 of 5, from step {step} in memory" for step in (24, 25)]
    assert finished.output.strip().endswith("mpidist run: finished in start 4 of 5")


@each_mpi
@pytest.mark.parametrize("wrapper", ["numpy", pytest.param("rows", marks=pytest.mark.long)])
def test_not_every_step_is_copied_and_the_bits_are_the_same(undisturbed, wrapper, python):
    """By default copies are so far apart that they take little time: here 25 steps."""
    finished, done = train(wrapper, "1:after:300:0", python, steps=400, SPACED="1")
    assert finished.status == 0, finished.output
    assert "start 2 of 5, from step 275 in memory" in finished.output
    assert done == [undisturbed(wrapper, 400, python=python)] * 3, finished.output


@pytest.mark.long
@each_mpi
def test_failure_at_one_step_is_no_progress_though_not_every_step_is_copied(python):
    finished, _ = train("numpy", "1:at300:1", python, restarts=12, steps=400, SPACED="1")
    assert finished.status != 0 and "starts in a row have ended alike at step" in finished.output


@pytest.mark.long
@pytest.mark.timeout(300)  # 15 processes import PyTorch, three at a time
@each_mpi
@pytest.mark.parametrize("wrapper", ["ddp", "zero"])
def test_killed_job_of_pytorch(undisturbed, wrapper, python):
    if python != sys.executable or find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    finished, done = train(wrapper, "1:after:9:0 0:before:1:1 2:committed:5:2", python)
    assert finished.status == 0 and done == [undisturbed(wrapper, STEPS, python=python)] * 3, (
        finished.output
    )


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("wrapper", ["numpy", pytest.param("rows", marks=takes_minutes)])
def test_random_kills(undisturbed, wrapper, python):
    steps, kills = elastic_chaos.STEPS[wrapper], [0.05, 0.15, 0.1, 0.02, 0.2]
    finished, killed, done = elastic_chaos.train(
        wrapper, steps, 3, 0, kills, restarts=5, survive=False, python=python
    )
    assert len(killed) == 5 and finished.status == 0, finished.output
    assert done == [undisturbed(wrapper, steps, python=python)] * 3, finished.output


@pytest.mark.long
@each_mpi
def test_exception_is_a_failure_like_others(python):
    finished, done = train("numpy", "1:after:9:0", python, how="raise", restarts=1)
    assert finished.status == 0 and len(done) == 3, finished.output
    assert "run: start 2 of 2, from step 8 in memory" in finished.output
    assert finished.output.count("failed first: ValueError: of the test\n") == 1


@needs_ulfm
def test_losses_survived_in_place_need_no_new_start():
    finished, done = train("numpy", "1:after:9:0 2:after:15:0", spares=1, survive=True)
    assert finished.status == 0, finished.output
    # The spare takes the first lost place; after the second loss the other two go on.
    assert "goes on with 3 ranks" in finished.output and "start 2 of" not in finished.output


@pytest.mark.long
@needs_ulfm
def test_all_ranks_lost_and_the_next_start_has_more_of_them():
    kills = "2:after:9:0 1:after:12:0 0:after:15:0"
    finished, done = train("rows", kills, survive=True)
    assert finished.status == 0, finished.output
    assert "goes on with 1 rank " in finished.output and "run: start 2 of 5" in finished.output
    assert len(set(done)) == 1 and f"of 3 ranks at step {STEPS}" in done[0], finished.output


PLAIN = """
import os, signal, sys, time
import mpidist as md
comm = md.init()
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
with open(__file__ + ".starts", "a") as file:  # the end of a job may lose what it prints
    file.write(os.environ["MPIDIST_RESTART"])
comm.barrier()
what, last = sys.argv[1], int(sys.argv[2])
if comm.rank == comm.size - 1 and int(os.environ["MPIDIST_RESTART"]) < last:
    if what == "raise":
        raise ValueError("of the test")
    if what == "absent":
        import a_module_of_no_package
    if what == "sleep":
        os.write(1, b"sleeps %s\\n" % os.environb[b"MPIDIST_VAULTS"])
        time.sleep(60)
    os._exit(int(what))
comm.barrier()
"""


@pytest.fixture
def plain(tmp_path):
    """Return a function that starts a program without md.elastic.

    Each of its two ranks adds the number of its start to ``starts``.
    """
    (tmp_path / "plain.py").write_text(PLAIN)

    def begin(*words, most, python=sys.executable):
        command = [python, "-m", "mpidist", "run", "-q", "-n", "2", "--max-restarts", str(most)]
        environ = processes.environment(PYTHONPATH=str(ROOT))
        command += [str(tmp_path / "plain.py"), *words]
        return subprocess.Popen(
            command, env=environ, stdout=-1, stderr=subprocess.STDOUT, text=True, bufsize=1
        )

    begin.starts = tmp_path / "plain.py.starts"
    return begin


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize(
    "what, last, most, status, starts, end",
    [
        ("3", 2, 2, 0, 3, "finished in start 3 of 3"),
        ("3", 9, 1, 3, 2, "that was start 2 of 2"),
        ("75", 9, 4, 75, 1, ""),
        ("raise", 9, 9, 1, 3, "no progress: 3 starts in a row have ended alike"),
        ("absent", 9, 9, 1, 1, "no new start: ModuleNotFoundError would come again"),
    ],
)
def test_program_without_elastic(plain, python, what, last, most, status, starts, end):
    with plain(what, str(last), most=most, python=python) as job:
        output, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == status, output
    assert plain.starts.read_text() == "".join(2 * str(start) for start in range(starts)), output
    assert output.strip().endswith(end), output


@each_mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signal_is_a_request_and_no_failure(plain, python, number):
    before = folders()
    with plain("sleep", "9", most=3, python=python) as job:
        while "sleeps" not in job.stdout.readline():
            assert job.poll() is None
        job.send_signal(number)
        output, _ = job.communicate(timeout=LIMIT)
    assert job.returncode not in (0, None) and plain.starts.read_text() == "00", output
    assert not left(before)


TWO = """
import os
import numpy as np
import mpidist as md
elastic = md.elastic  # before the import of the module of this name
from mpidist.recovery import records
from mpidist.recovery.records import Ranks

again = int(os.environ["MPIDIST_RESTART"])
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
if again and rank == 0:  # as of a start that was killed before its first records were complete
    Ranks(2, 1, 7, 2).vault(records.folder(), 0).write(99, [b"torn"])

@elastic
def train(comm, state, name, steps):
    begun = state.step
    while state.step < steps:
        comm.allreduce(np.ones(1))
        state.commit(name=name)
        if (name, state.step, again, comm.rank) == ("second", 5, 0, 1):
            os.kill(os.getpid(), 9)
    if comm.rank == 0:
        line = f"start {again}: {name} from {begun} to {state.step} {state.values['name']}\\n"
        os.write(1, line.encode())

train(md.State(copies=True), "first", 3)  # so its last step is there
train(md.State(w=np.zeros(3), copies=True), "second", 9)
"""


@pytest.mark.long
def test_program_of_two_trainings_and_records_that_are_not_complete(tmp_path):
    """The first one has ended, and the second one goes on from the last complete records."""
    (tmp_path / "two.py").write_text(TWO)
    command = [sys.executable, "-m", "mpidist", "run", "-q", "-n", "2", "--max-restarts", "1"]
    environ = processes.environment(PYTHONPATH=str(ROOT))
    done = processes.run([*command, str(tmp_path / "two.py")], LIMIT, environ)
    assert done.status == 0, done.output
    assert "start 0: first from 0 to 3 first\n" in done.output
    assert "start 1: first from 3 to 3 first\n" in done.output
    assert any(f"start 1: second from {n} to 9 second\n" in done.output for n in (4, 5))
    torn = "no step of start 2, generation 7 of which all ranks have left records: that of rank 1"
    assert done.output.count(torn) == 1, done.output


def folders():
    """Return the folders of jobs that nobody locks; other jobs may run meanwhile."""
    # Not by locking them, which a job that begins would take for its removal.
    locked = re.findall(r"FLOCK .*:(\d+) 0 EOF$", Path("/proc/locks").read_text(), re.MULTILINE)
    found = set()
    for path in Path("/dev/shm").glob(f"{restarts.PREFIX}*"):
        with suppress(FileNotFoundError):
            if str(path.stat().st_ino) not in locked:
                found.add(path.name)
    return found


def left(before, seconds=20):
    """Return the folders that a job has left; those of other jobs that begin or end soon go."""
    until = time.monotonic() + seconds
    while (found := folders() - before) and time.monotonic() < until:
        time.sleep(0.1)
    return found


@pytest.mark.long
def test_killed_mpidist_run_is_cleaned_up_after_by_the_next(plain):
    with plain("sleep", "9", most=3) as job:
        while "sleeps" not in (line := job.stdout.readline()):
            assert job.poll() is None
        job.kill()
        job.communicate(timeout=LIMIT)  # its ranks have ended, too
    made = Path(line.split()[-1]).name
    with plain("0", "9", most=0) as job:
        job.communicate(timeout=LIMIT)
    assert made not in folders()


def test_folder_of_a_job_that_runs_stays():
    with Restarts(1, True) as mine:
        folder = Path(mine.settings["MPIDIST_VAULTS"])
        assert oct(folder.stat().st_mode & 0o777) == "0o700"
        restarts.remove_left()
        assert folder.is_dir()
    assert not folder.exists()
    with Restarts(0, True) as none, Restarts(2, False) as elsewhere:
        assert none.settings == {} and elsewhere.settings == {"MPIDIST_RESTART": "0"}


@pytest.mark.parametrize("words", [["--max-restarts", "-1"], ["--max-restarts", "many"]])
def test_bad_number_is_refused(words):
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", *words, "train.py"]
    done = processes.run(command, 60, processes.environment(PYTHONPATH=str(ROOT)))
    assert done.status == 2 and "Invalid value for '--max-restarts'" in done.output


def test_dry_run_makes_nothing():
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", "--max-restarts", "3"]
    environ = processes.environment(PYTHONPATH=str(ROOT))
    before = folders()
    done = processes.run([*command, "--dry-run", "true"], 60, environ)
    assert done.status == 0 and "MPIDIST_VAULTS" not in done.output
    assert not left(before)


def test_no_watch_is_refused_with_restarts():
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", "--max-restarts", "3"]
    environ = processes.environment(PYTHONPATH=str(ROOT))
    done = processes.run([*command, "--no-watch", "true"], 60, environ)
    assert done.status != 0 and "--no-watch: only without" in done.output


def ended(cause, interrupted=0, passed=(), told="rank 1 failed", stopped=False):
    known = {"interrupted": interrupted, "passed": set(passed), "told": told, "stopped": stopped}
    return SimpleNamespace(cause=cause, **known)


def raised(line, rank=0, kind="ValueError"):
    text = f'Traceback\n  File "train.py", line {line}, in <module>\n{kind}: {rank}\n'
    return Failure(rank, "n1", kind, f"{kind}: {rank}", text)


def test_again_until_the_same_failure_has_come_three_times():
    with Restarts(9, False) as starts:
        assert starts.again(ended(raised(5)), 1) and starts.again(ended(raised(6)), 1)
        assert starts.again(ended(raised(6, rank=1)), 1)  # whichever rank has it
        assert not starts.again(ended(raised(6)), 1)
        assert starts.number == 3


def test_again_after_a_failure_that_was_long_in_coming(monkeypatch):
    clock = iter(range(0, 1000, 100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    killed = RankState(1, "n1", status=-9)
    with Restarts(5, False) as starts:
        assert [starts.again(ended(killed), 137) for _ in range(6)] == [True] * 5 + [False]


SAME = ["ModuleNotFoundError", "SyntaxError", "UnknownName", "InvalidArgument", "MemoryError"]


@pytest.mark.parametrize(
    "cause, what",
    [
        *((raised(5, kind=kind), kind) for kind in SAME),
        *((RankState(1, "n1", n), f"exit code {n} before MPI_Init") for n in (2, 127)),
    ],
)
def test_not_again_if_nothing_was_done_and_the_same_would_come(cause, what, capsys):
    with Restarts(5, False) as starts:
        assert not starts.again(ended(cause), 1) and starts.number == 0
    assert f"run: no new start: {what} would come again\n" in capsys.readouterr().err


def test_again_where_something_was_done_before_it(monkeypatch):
    """As it may come from what a program has read, long after its begin."""
    wrong = raised(5, kind="InvalidArgument")
    with Restarts(9, True) as starts:
        folder = Path(starts.settings["MPIDIST_VAULTS"])
        Ranks(1, 0, 0, 1).vault(folder, 0).write(7, [b"progress"])
        assert starts.again(ended(wrong), 1)
        assert not starts.again(ended(wrong), 1)
    assert RankState(1, "n1", 2, mpi="started").comes_again == ""
    clock = iter(range(0, 1000, 100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with Restarts(9, False) as starts:
        assert starts.again(ended(wrong), 1) and starts.again(ended(wrong), 1)


def test_again_where_a_later_training_has_come_less_far():
    wrong = raised(5, kind="MemoryError")
    with Restarts(9, True) as starts:
        folder = Path(starts.settings["MPIDIST_VAULTS"])
        for number, step in ((1, 1000), (2, 50)):
            Ranks(number, 0, 0, 1).vault(folder, 0).write(step, [b"progress"])
            assert starts.again(ended(wrong), 1)
        assert not starts.again(ended(wrong), 1)


@pytest.mark.parametrize("code", [2, 127])
def test_again_after_hours_of_a_program_that_starts_mpi_itself(code, monkeypatch):
    """Nothing tells that it has come through MPI_Init."""
    clock = iter(range(0, 1000, 100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with Restarts(9, False) as starts:
        assert starts.again(ended(RankState(1, "n1", code)), code)


@pytest.mark.parametrize(
    "job, status",
    [
        (ended(None, interrupted=signal.SIGTERM), 143),
        (ended(RankState(0, "n1", status=-10), passed=[signal.SIGUSR1]), 138),
        (ended(RankState(0, "n1", status=3), stopped=True), 3),
        (ended(None), 75),
        (ended(None), 0),
    ],
)
def test_not_again_after_a_request(job, status):
    with Restarts(5, False) as starts:
        assert not starts.again(job, status) and starts.number == 0
