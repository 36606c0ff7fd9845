"""What a forked child does at its end is nothing to the job of its parent."""

import sys
from pathlib import Path

import pytest

from mpidist.engine.door import Door
from mpidist.errors import CommunicatorBroken, CommunicatorInUse
from tests.support.processes import environment, run

JOB = Path(__file__).with_name("test_door_mpi.py")


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("how", "status"), [("sys.exit", 7), ("exit", 7), ("raise", 1), ("end", 0)]
)
def test_a_forked_childs_end_is_nothing_to_the_job(tmp_path, how, status, traced):
    trace = str(tmp_path / "trace.json") if traced else "-"
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", str(JOB), how, trace]
    done = run(command, 60, environment(), tmp_path)
    assert done.status == 0 and not done.timed_out, done.output
    lines = done.output.splitlines()
    assert f"status {status}" in lines and lines.count("sum 2") == 2, done.output
    assert "failed" not in done.output and done.seconds < 30, done.output
    assert ("ValueError: in the child" in done.output) == (how == "raise")
    assert not traced or Path(trace).stat().st_size > 100


def test_a_caller_whose_holder_leaves_meanwhile_takes_its_place(monkeypatch):
    """Else a third caller would find the token, and two be inside."""
    door = Door(0)
    token = door.take()
    monkeypatch.setattr(sys, "_current_frames", lambda: door.leave(token) or {})
    assert door.take_or_refuse() is token
    with pytest.raises(IndexError):
        door.take()


def test_a_caller_that_is_not_found_is_not_taken_for_one_that_left():
    """Only a token that was dropped comes back."""
    door = Door(0)
    token = door.take()
    with pytest.raises(CommunicatorInUse, match="rank 0: another call"):
        door.take_or_refuse()
    del token
    assert door.take()


def test_a_door_that_is_closed_stays_closed():
    door = Door(3)
    with door:
        door.close("it broke")
    with pytest.raises(CommunicatorBroken, match="rank 3: it broke"), door:
        pass
    assert door.enter_pending() is None  # messages may still complete
