"""The Python program of a rank: it reports how it ends."""

import socket
import subprocess
import sys
import threading

import pytest

from mpidist.communicator.launcher_notes import LONGEST, NOTES
from mpidist.launcher.notes import Notes
from mpidist.launcher.program import Program
from tests.support.launcher_kits import RANK, rank_program, supervised
from tests.support.processes import environment, run

FORKED = "import os, sys\nchild = os.fork()\nif not child"
KILLED = "os.waitpid(child, 0); os.kill(os.getpid(), 9)"


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
        (f"{FORKED}: sys.exit()\n{KILLED}", 137, "rank 0 on {} was killed by signal 9"),
        (f"{FORKED}: pass\nelse: {KILLED}", 137, "rank 0 on {} was killed by signal 9"),
        ("print('well')", 0, ""),
    ],
)
def test_end_of_a_rank_is_told(tmp_path, capfd, program, status, told):
    assert supervised(1, Notes).run(rank_program(tmp_path, program), RANK) == status
    lines = [x for x in capfd.readouterr().err.splitlines() if x.startswith("mpidist run: rank")]
    if told:
        assert len(lines) == 1 and told.format(socket.gethostname()) in lines[0]
    else:
        assert not lines


def test_module_runs_as_by_python(tmp_path, capfd, monkeypatch):
    """With the folder and arguments that it has without mpidist run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "import sys\nprint(__name__, *sys.argv, repr(sys.path[0]), flush=True)\nsys.exit(1 / 0)"
    )
    words = [sys.executable, "-m", "own", "-m", "x"]
    alone = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert supervised(2, Notes).run(Program.find(words).reporting(), RANK) == 1
    told = capfd.readouterr()
    assert told.out == alone.stdout and "-m x" in told.out
    last = told.err.splitlines()[-1]  # the other rank is perhaps on another host
    assert "rank 0 on " in last and last.endswith(" failed: ZeroDivisionError: division by zero")


NOBODY = """
import pathlib, sys, time
def sleep(_, sleep=time.sleep):
    while not pathlib.Path("closed").exists():
        sleep(0.01)
time.sleep = sleep
raise ValueError("7" * int(sys.argv[1]))
"""


def test_exception_that_nobody_takes_is_printed(tmp_path):
    """No mpidist run, it is gone, or it ends while the rank waits for others; or too long."""
    words = rank_program(tmp_path, NOBODY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taker:
        taker.bind("\0mpidist-test")
        taker.settimeout(100)

        def take():
            while b"failure" not in taker.recv(LONGEST):
                pass
            taker.close()
            (tmp_path / "closed").touch()

        guest = threading.Thread(target=take)
        guest.start()
        for name in ("", "mpidist-nobody", "mpidist-test"):
            told = subprocess.run(
                [*words, "3"],
                env={**RANK, NOTES: name},
                cwd=tmp_path,
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
