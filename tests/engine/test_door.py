"""Who may enter a door and who is refused; a forked child's end is nothing to its parent's job."""

import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist.engine.door import Door
from mpidist.errors import CommunicatorBroken, CommunicatorInUse
from tests.support.processes import environment, run

LIMIT = 100  # seconds; each takes two
JOB = Path(__file__).with_name("test_door_mpi.py")


@pytest.mark.long
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("how", "status"), [("sys.exit", 7), ("exit", 7), ("raise", 1), ("end", 0)]
)
def test_a_forked_childs_end_is_nothing_to_the_job(tmp_path, how, status, traced):
    trace = str(tmp_path / "trace.json") if traced else "-"
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", str(JOB), how, trace]
    done = run(command, LIMIT, environment(), tmp_path)
    assert done.status == 0 and not done.timed_out, done.output
    lines = done.output.splitlines()
    assert f"status {status}" in lines and lines.count("sum 2") == 2, done.output
    assert not re.search("failed|ending it", done.output) and done.seconds < 30, done.output
    assert ("ValueError: in the child" in done.output) == (how == "raise")
    assert not traced or Path(trace).stat().st_size > 100


def test_a_caller_whose_holder_leaves_meanwhile_takes_its_place(monkeypatch):
    """Else a third caller would find the token, and two be inside."""
    door = Door(0)
    token = door.take()
    found = "_calls_of_other_threads"
    monkeypatch.setattr(f"mpidist.engine.door.{found}", lambda: door.leave(token) or ["thread 1"])
    assert door.take_or_refuse() is token
    with pytest.raises(IndexError):
        door.take()


def test_threads_are_named_with_their_calls_but_not_those_that_wait_to_enter():
    def inside(comm):
        made, told, done, named = comm.split(0), threading.Event(), threading.Event(), []

        def slow(a, b):
            told.set()
            done.wait(10)  # for who is not refused waits for this
            return a + b

        def call():
            made.allreduce(np.ones(3), op=mpidist.Op(slow, commute=True))

        def refused():
            with pytest.raises(CommunicatorInUse) as error:
                made.barrier()
            named.append(str(error.value))
            if len(named) == 3:
                done.set()

        threads = [threading.Thread(target=call, name="inside")]
        threads += [threading.Thread(target=refused, name=f"outside {k}") for k in range(3)]
        threads[0].start()
        assert told.wait(10)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(20)
        return named

    for named in mpidist.run_simulated(2, inside):
        assert len(named) == 3
        for k, text in enumerate(sorted(named)):
            call = (
                rf"barrier \(.*test_door.py:\d+\) was called in thread 'outside {k}' while thread"
            )
            assert re.search(rf"{call} 'inside' is in allreduce \(.*test_door.py:\d+\)", text), text
            assert text.count("outside") == 1


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


def entered(door):
    """Enter and leave; as a call of the package, which a refusal names."""
    door.leave(door.enter_pending())


def test_a_shared_door_is_waited_for_but_not_for_ever():
    """The wait for the thread inside ends when it leaves, or else with the patience, as a refusal.

    The door is open to all afterwards.
    """
    door = Door(2)
    door.patience = 30.0
    token = door.take()
    leaving = threading.Timer(0.2, door.leave, [token])
    begin = time.monotonic()
    leaving.start()
    entered(door)
    assert 0.1 < time.monotonic() - begin < 10
    leaving.join()
    door.patience = 0.2
    held = [door.take()]
    with pytest.raises(CommunicatorInUse, match="rank 2: another call"):
        entered(door)
    door.leave(held.pop())
    entered(door)


def test_who_gives_way_enters_again():
    door, order = Door(0), []
    door.patience = 30.0
    held = [door.take()]

    def other():
        with door:
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    while not order:
        door.give_way(held)
    assert len(held) == 1
    thread.join()
    with pytest.raises(IndexError):
        door.take()
    door.close("it broke")
    door.give_way(held)  # nobody can come in
    assert len(held) == 1


def test_who_gives_way_is_told_that_the_door_was_closed():
    door = Door(1)
    door.patience = 30.0
    held = [door.take()]
    thread = threading.Thread(target=lambda: door.close("it broke") if door.enter_pending() else 0)
    thread.start()
    with pytest.raises(CommunicatorBroken, match="rank 1: it broke"):
        while True:
            door.give_way(held)
    thread.join()
    assert not held
