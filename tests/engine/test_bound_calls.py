"""What is kept of bound calls when not all of them fit."""

import gc
from dataclasses import dataclass

import numpy as np
import pytest

from mpidist.engine import bound_calls
from mpidist.engine.bound_calls import BoundCalls


@dataclass
class Entry:
    nbytes: int
    used: int


class Uses:
    """Makes calls by a cache of bound calls; counts what was found and what was bound."""

    def __init__(self, limit, nbytes=1):
        self.kept, self.nbytes = BoundCalls(limit), nbytes
        self.now = self.found = self.bound = 0

    def __call__(self, keys):
        """Use these in turn; return how many were found, and how many were bound."""
        self.found = self.bound = 0
        for key in keys:
            entry = self.kept.entries.get(key)
            if entry is not None:
                entry.used, self.found = self.now, self.found + 1
            elif self.kept.make_room(self.kept.last_use(key, self.now), self.nbytes):
                self.kept.keep(key, Entry(self.nbytes, self.now))
                self.bound += 1
            self.now += 1
        return self.found, self.bound


@pytest.mark.parametrize("count", (100, 101, 110, 150, 200, 300, 1000))
def test_loops_over_more_than_fits(count):
    """As many as fit stay bound; nothing is bound for one turn and dropped before the next."""
    use = Uses(100)
    for turn in range(30):
        found, bound = use(range(count))
        if turn:
            assert (found, bound) == (100, 0)
    assert len(use.kept.entries) == use.kept.nbytes == 100


def test_what_is_not_used_any_more_gives_way():
    use = Uses(100)
    for _ in range(3):
        use(range(100))
    use(range(200, 300))
    assert use(range(200, 300))[1] == 100  # bound at the second use: nobody used the others since
    assert use(range(200, 300)) == (100, 0)
    assert use.kept.nbytes == 100


def test_part_of_a_loop_changes():
    use = Uses(100)
    for _ in range(3):
        use(range(150))
    old = set(use.kept.entries)
    again = [key for key in old if key < 50] + list(range(300, 350))
    for _ in range(20):
        use(again)
    assert use(again) == (len(again), 0)


def test_calls_made_once_change_nothing():
    use = Uses(100)
    for _ in range(3):
        use(range(100))
    assert use(range(1000, 2000)) == (0, 0)
    assert use(range(100)) == (100, 0)


def test_bytes_count():
    keeps = BoundCalls(100)
    for key, nbytes in enumerate((60, 30, 10)):
        assert keeps.make_room(None, nbytes)
        keeps.keep(key, Entry(nbytes, 0))
    assert not keeps.make_room(None, 1)
    keeps.keep(0, Entry(20, 0))  # in the place of the 60
    assert keeps.nbytes == 60 and keeps.make_room(None, 40)
    keeps.drop(1)
    keeps.drop(1)
    assert keeps.nbytes == 30 and list(keeps.entries) == [2, 0]
    keeps.clear()
    assert keeps.nbytes == 0 and not keeps.entries


def test_one_that_is_larger_than_the_limit():
    """It is kept alone, and beside others if its size is known only once it is bound."""
    keeps = BoundCalls(100)
    assert keeps.make_room(None, 500)
    keeps.keep("large", Entry(500, 0))
    assert not keeps.make_room(None, 1) and keeps.make_room(1, 1)
    assert not keeps.entries
    keeps.keep("small", Entry(99, 0))
    assert keeps.make_room(None)
    assert not keeps.make_room(None, 2)


def test_calls_are_known_by_their_array():
    keeps, x = BoundCalls(100), np.zeros(3)
    assert keeps.last_use("call", 1, x) is None
    assert keeps.last_use("call", 2, x) == 1
    assert keeps.last_use("call", 3, np.zeros(3)) is None  # another with the same key
    with pytest.raises(TypeError, match="unhashable"):
        keeps.last_use([], 4, x)
    with pytest.raises(TypeError, match="weak reference"):
        keeps.last_use("call", 5, 1.0)


def test_what_is_noted_is_bounded(monkeypatch):
    monkeypatch.setattr(bound_calls, "NOTED", 64)
    keeps, held = BoundCalls(100), [np.zeros(1) for _ in range(300)]
    for key, x in enumerate(held):
        keeps.last_use(key, key, x)
        assert len(keeps._noted) <= 64
    assert keeps.last_use(299, 300, held[299]) == 299
    del held, x
    gc.collect()
    for key in range(400, 600):
        keeps.last_use(key, key)
        assert len(keeps._noted) <= 64
