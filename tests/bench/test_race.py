"""The race: turns, warm-up, and the slowest rank's times."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist.bench import race as races
from mpidist.bench.race import Contender, in_turn, medians, no_garbage_collection, race, rows


class Clock:
    """A clock that only the contenders move, and what they did."""

    def __init__(self, monkeypatch):
        self.now, self.done = 0.0, []
        monkeypatch.setattr(races, "perf_counter", lambda: self.now)

    def takes(self, seconds, name):
        def act():
            self.now += seconds
            self.done.append(name)

        return act


def test_in_turn_every_order_of_neighbours():
    """Else one would find in the cache what that other one left, and the other one would not."""
    called = []

    def measure(name):
        called.append(name)
        return (ord(name),)

    names = ["a", "b", "c", "d"]
    for iteration in range(60):
        figures = in_turn(names, iteration, measure)
        assert figures == [(97,), (98,), (99,), (100,)], "in the order given"
    orders = [called[k : k + 4] for k in range(0, 240, 4)]
    pairs = {pair for order in orders for pair in zip(order, order[1:])}
    assert all(sorted(order) == names for order in orders) and len(pairs) == 12
    assert {order[0] for order in orders} == set(names)


def test_race_is_of_the_slowest_rank(comm):
    """One sleeps on the last rank alone: all ranks have its time."""
    slow = Contender("slow", races.nothing, warm=1)
    slow.block = lambda wait: float(comm.rank)
    quick = Contender("quick", races.nothing)
    times = race(comm, [slow, quick], 4)
    assert times.shape == (4, 2) and (times[:, 0] == comm.size - 1).all()
    told = comm.allgather_object(times.tolist())
    assert all(other == told[0] for other in told)


def test_contender_block_is_the_mean_of_its_calls(monkeypatch):
    clock = Clock(monkeypatch)
    one = Contender("a", clock.takes(2.0, "act"), clock.takes(5.0, "prepare"), untimed=2, calls=3)
    comm = SimpleNamespace(barrier=clock.takes(7.0, "barrier"))
    assert one.measure(comm) == 2.0
    assert clock.done == ["prepare", "act", "act", "barrier", "act", "act", "act"]


def test_contender_waits_before_the_barrier_and_before_the_clock_is_read(monkeypatch):
    clock = Clock(monkeypatch)
    one = Contender("a", clock.takes(2.0, "act"), clock.takes(5.0, "prepare"), untimed=1, calls=3)
    comm = SimpleNamespace(barrier=clock.takes(7.0, "barrier"))
    assert one.measure(comm, clock.takes(6.0, "wait")) == (3 * 2.0 + 6.0) / 3
    assert clock.done == ["prepare", "act", "wait", "barrier", "act", "act", "act", "wait"]


@pytest.mark.parametrize(
    ("warm", "until", "calls"), [(None, 0, 3), (1, 0, 1), (0, 0, 0), (2, 5, 5)]
)
def test_contender_warm_up_goes_on_until_ready(warm, until, calls):
    done = []
    one = Contender("a", lambda: done.append(0), warm=warm, ready=lambda: len(done) >= until)
    one.warm_up()
    assert len(done) == calls


def test_rows_have_medians_and_ratios_to_the_first(comm, monkeypatch):
    times = np.array([[2.0, 8.0], [4.0, 1.0], [3.0, 6.0]])
    monkeypatch.setattr(races, "race", lambda *_: times)
    assert medians(times) == [3.0, 6.0]
    found = rows(comm, "a step", [Contender("a", len), Contender("b", len)], 3)
    assert [(row.candidate, row.time_us, row.ratio) for row in found] == [
        ("a", 3e6, 1.0),
        ("b", 6e6, 0.5),
    ]
    assert {(row.work, row.ranks) for row in found} == {("a step", comm.size)}


def test_no_garbage_collection_is_restored():
    with pytest.raises(ArithmeticError), no_garbage_collection():
        assert not gc.isenabled()
        raise ArithmeticError
    assert gc.isenabled()
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled(), "the caller had disabled it"
    finally:
        gc.enable()
