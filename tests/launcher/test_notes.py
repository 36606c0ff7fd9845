"""Notes that ranks send without monitors, of this user only."""

import os
import subprocess

import pytest

from mpidist.backends.recorder import Recorder
from mpidist.launcher.movement import Movement
from mpidist.launcher.notes import Notes
from mpidist.launcher.ranks import RankState
from tests.support.launcher_kits import KINDS, RANK, monitored, python, supervised

STRANGER = """
import os, socket, sys
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for name in sys.argv[2:]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.sendto(sys.argv[1].encode(), chr(0) + name)
"""
FORGED = [
    '{"status": 0}',
    '{"rank": 0, "host": "x", "exit": 7}',
    '{"rank": 0, "host": "x", "mpi": "starting"}',
    '{"rank": 0, "host": "x", "failure": {"kind": "X", "line": "forged", "text": "forged"}}',
    "[" * 20_000,
]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, which can become another user")
@pytest.mark.parametrize("kind", KINDS)
def test_note_of_another_user_is_not_read(capfd, kind):
    """Each forged note is sent to the job's socket by a process of another user."""
    mark = "MPIDIST_RUN_NOTES"
    program = (
        "import os, subprocess, sys\n"
        f"for note in {FORGED!r}:\n"
        f"    subprocess.run([sys.executable, '-c', {STRANGER!r}, note, os.environ[{mark!r}]],"
        " check=True)\n"
        "print('FINISHED WELL')\n"
    )
    job = supervised(1, kind)
    assert monitored(job, *python(program)) == 0
    said = capfd.readouterr()
    assert "FINISHED WELL" in said.out and "forged" not in said.err
    assert all(not state.mpi and not state.left for state in job.known.values())


def test_note_of_an_end_is_not_one():
    """The kernel says when a rank has ended, and its launcher with which exit code."""
    tell = (
        "from mpidist.communicator.launcher_notes import send_note\n"
        "import sys; assert send_note(status=0) and send_note(status=7); sys.exit(3)"
    )
    job = supervised(1, Notes)
    assert monitored(job, *python(tell)) == 3 and job.ended == [job.known[0]]
    assert job.known[0].status == 3


@pytest.mark.parametrize("at_once", [1, 100])
def test_rank_that_was_gone_before_its_notes_were_read_has_ended(monkeypatch, at_once):
    monkeypatch.setattr("mpidist.launcher.notes.AT_ONCE", at_once)
    tell = (
        "from mpidist.communicator.launcher_notes import send_note\n"
        "assert send_note(mpi='starting') and send_note(exit=3)"
    )
    notes, found = Notes(1), []
    try:
        subprocess.run(python(tell), env={**RANK, **notes.variables}, check=True)
        for _ in range(4):
            found += notes.listen(0)
    finally:
        notes.close()
    assert [(rank.number, report and report.exit) for rank, report in found] == [
        (0, None),
        (0, 3),
        (0, None),
    ]
    assert found[-1][1] is None


def test_record_that_is_gone_is_not_looked_at_any_more(tmp_path):
    recorder = Recorder(tmp_path / "job", 0, 1)
    notes, rank = Notes(1, 0.01), RankState(0, "here", still=True)
    try:
        notes._known[0] = rank
        notes._movements[0] = Movement(str(recorder.job), os.getpid(), 0.01)
        recorder.path.unlink()
        notes.listen(0)
        assert rank.still is None and not notes._movements and notes.listen(0) == []
    finally:
        notes.close()
