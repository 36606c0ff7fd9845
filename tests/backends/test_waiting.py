"""poll(): its processor time, its lateness and its deadline, by a clock that the test moves."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from mpidist.backends import waiting
from mpidist.backends.waiting import POLLING, poll
from mpidist.errors import RankFailed

SLACK = 55e-6  # a sleep takes longer than asked
IDLE, PIECE = 2e-6, 12e-6  # a poll that finds nothing, and one that moves a piece of a message


class Clock:
    """A clock that polls, yields and sleeps move.

    Attributes
    ----------
    now, busy : float
        The time, and the processor time.
    """

    def __init__(self, monkeypatch):
        self.now = self.busy = 0.0
        clock = SimpleNamespace(
            monotonic=lambda: self.now, thread_time=lambda: self.busy, sleep=self.sleep
        )
        monkeypatch.setattr(waiting, "time", clock)
        monkeypatch.setattr(waiting, "os", SimpleNamespace(sched_yield=lambda: self.run(1e-6)))

    def run(self, seconds):
        """Pass time of the processor."""
        self.now += seconds
        self.busy += seconds

    def sleep(self, seconds):
        """Pass time without the processor."""
        self.now += seconds + SLACK


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def wait(clock, seconds, deadline=None):
    """Poll for something that happens after `seconds`; return the result and the lateness."""
    end = clock.now + seconds

    def test():
        clock.run(IDLE)
        return clock.now >= end

    result = poll(test, deadline)
    return result, clock.now - end


@pytest.mark.parametrize("seconds", [2e-3, 5e-3, 20e-3, 0.1, 1.0, 60.0])
def test_a_long_wait_costs_little_processor_time_and_ends_in_time(clock, seconds):
    result, late = wait(clock, seconds)
    assert result and late <= 0.02 * seconds + 2 * SLACK and late < 1e-3
    assert clock.busy <= 1.5e-3 + 0.04 * seconds


@pytest.mark.parametrize("seconds", [0.0, 10e-6, 100e-6, 0.9e-3])
def test_a_short_wait_never_sleeps(clock, seconds):
    assert wait(clock, seconds)[1] < 2 * IDLE
    assert clock.busy == clock.now


@pytest.mark.parametrize("before", [0.5e-3, 5e-3, 50e-3, 0.5])
def test_a_message_in_pieces_is_not_slowed_down_by_sleeps(clock, before):
    left = 100

    def test():
        nonlocal left
        if clock.now < before:
            clock.run(IDLE)
        else:
            clock.run(PIECE)
            left -= 1
        return left == 0

    assert poll(test, None)
    assert clock.now - before < 4e-3  # with a sleep of 500 µs before each: 55e-3


@pytest.mark.parametrize("came", [True, False])
def test_a_rank_that_is_lost_behind_what_is_waited_for_is_none_of_this_wait(clock, came):
    """It may come, and end, while this process is not running between its two looks."""
    there = False

    def test():
        clock.run(IDLE)
        return there

    def look():
        nonlocal there
        there = came
        raise RankFailed("rank 0: rank 1 has ended", ranks=(1,), reasons={1: "has ended"})

    with nullcontext() if came else pytest.raises(RankFailed):
        assert poll(test, None, nudge=look)


@pytest.mark.parametrize("gentle", [False, True])
def test_no_poll_outlasts_its_deadline(clock, monkeypatch, gentle):
    monkeypatch.setattr(POLLING, "gentle", gentle)
    result, early = wait(clock, 10.0, deadline=2.0)
    assert not result and -8.0 <= early <= -8.0 + 1e-3


def test_a_gentle_wait_leaves_the_core_from_the_start(clock, monkeypatch):
    monkeypatch.setattr(POLLING, "gentle", True)
    assert wait(clock, 20e-3)[1] <= 0.02 * 20e-3 + 2 * SLACK
    assert clock.busy < 1e-3
