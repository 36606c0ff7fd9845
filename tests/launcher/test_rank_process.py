"""The monitor of one rank: its log, its signals, and what the program leaves behind."""

import os
import signal
import sys
import time

import pytest

from mpidist.launcher.connections import Connections
from mpidist.launcher.supervisor import Supervisor
from tests.support import processes
from tests.support.launcher_kits import (
    RANK,
    monitored,
    python,
    rank_program,
    supervised,
)


def test_log_full_disk_ends_the_log_only(tmp_path):
    """A limit of the file's size stands for the disk."""
    program = "for k in range(3000): print('a line that does not fit', k)"
    watch = Supervisor(Connections(1, logs=str(tmp_path)))
    limited = [
        "sh",
        "-c",
        'ulimit -f 4; exec "$@" >/dev/null 2>&1',
        "sh",
        *watch.reports.command(python(program)),
    ]
    assert watch.run(limited, RANK) == 0
    assert 0 < (tmp_path / "rank-00000.log").stat().st_size < 30_000


def test_log_is_not_written_through_a_link(tmp_path, capfd):
    (tmp_path / "precious").write_text("kept")
    os.symlink("precious", tmp_path / "rank-00000.log")
    watch = Supervisor(Connections(1, logs=str(tmp_path)))
    assert monitored(watch, "echo", "shown") == 0
    assert (tmp_path / "precious").read_text() == "kept"
    said = capfd.readouterr()
    assert "shown" in said.out and "rank 0 has no log" in said.err


def test_note_says_only_what_is_the_programs_to_tell():
    """A process of the job's own user cannot announce the end of a rank: its monitor does."""
    tell = (
        "from mpidist.communicator.launcher_notes import send_note\n"
        "assert send_note(status=5) and send_note(failure=7) and send_note(exit='x')\n"
    )
    watch = supervised(1)
    assert monitored(watch, *python(tell)) == 0


LATE = """
import signal, sys, threading, time
came = threading.Event()
time.sleep(0.4)  # as long as it takes to import what one needs
signal.signal(signal.SIGUSR1, lambda *_: came.set())
sys.exit(0 if came.wait(100) else 1)
"""


def test_signal_waits_for_a_handler(tmp_path):
    """It was sent before the rank was there, and waits until the program has a handler.

    The shell around the program has none, and is not ended by it.
    """
    watch, program = supervised(1), tmp_path / "late.py"
    program.write_text(LATE)
    watch.reports.send(signal.SIGUSR1)
    shell = ["sh", "-c", f"{sys.executable} {program}; exit $?"]
    assert monitored(watch, *shell) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("left", "last", "does", "codes"),
    [
        (
            "sleep 600",
            "wait",
            # It has two children: the program, and the guard that kills what that leaves behind.
            "until [ -e {} ] && [ $(wc -w < /proc/$!/task/$!/children) = 2 ]; do sleep 0.05; done;"
            " kill -9 $!; wait $!",
            (1, 137),
        ),
        ("sh -c 'trap : TERM; sleep 600; sleep 600'", "exit 0", "wait $!", (0,)),
    ],
    ids=["killed", "well"],
)
def test_children_of_a_shell_are_ended(tmp_path, monkeypatch, left, last, does, codes):
    """The process beside the rank is killed, or the shell ends: with it all of the rank.

    What it leaves behind holds its output, and does not hear SIGTERM.
    """
    number = tmp_path / "number"
    program = f"{left} & echo $! > {number}.part; mv {number}.part {number}; {last}"
    watch, begun = Supervisor(Connections(1, label=True)), time.monotonic()
    words = watch.reports.command(["sh", "-c", program])
    assert watch.run(["sh", "-c", f'"$@" & {does.format(number)}', "sh", *words], RANK) in codes
    assert time.monotonic() - begun < 200
    until = time.monotonic() + 60
    while processes.stat(int(number.read_text()))[:1] not in ([], ["Z"]):
        assert time.monotonic() < until, "the child of the shell is still there"
        time.sleep(0.02)


def test_log_has_the_traceback(tmp_path, capfd):
    watch = Supervisor(Connections(1, logs=str(tmp_path)))
    assert monitored(watch, *rank_program(tmp_path, "print(1)\n1 / 0")) == 1
    log = (tmp_path / "rank-00000.log").read_text()
    told = capfd.readouterr().err.splitlines()
    lines = log.splitlines()  # in either order: the exception comes by another way than the output
    assert lines.count("1") == lines.count("ZeroDivisionError: division by zero") == 1
    assert told.count("ZeroDivisionError: division by zero") == 1
    assert told[-1].endswith(f"division by zero; its log: {tmp_path}/rank-00000.log")
