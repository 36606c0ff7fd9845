"""What is kept of bound calls when not all of them fit."""

import gc

import numpy as np
import pytest

from mpidist.backends.program import Program
from mpidist.engine import programs
from mpidist.engine.programs import Bound, Programs


class Clock:
    """Counts the operations."""

    sequence = 0


def entry(nbytes):
    """Make a bound call that holds so many bytes."""
    made = Bound([Program([])], None)
    made.nbytes = nbytes
    return made


def cache(limit):
    """Make a cache whose clock the test sets."""
    return Programs(Clock(), limit)


def use_at(keeps, now, *of):
    """Note a use at a time; return the time of the last one."""
    keeps._clock.sequence = now
    return keeps.last_use(*of)


class Uses:
    """Makes calls by a cache of bound calls; counts what was found and what was bound."""

    def __init__(self, limit, nbytes=1):
        self.kept, self.nbytes = cache(limit), nbytes
        self.now = self.found = self.bound = 0

    def __call__(self, keys):
        """Use these in turn; return how many were found, and how many were bound."""
        self.found = self.bound = 0
        for key in keys:
            self.kept._clock.sequence = self.now
            if self.kept.get(key) is not None:
                self.found += 1
            elif self.kept.make_room(self.kept.last_use(key), self.nbytes):
                self.kept.keep(key, entry(self.nbytes))
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


def test_unused_programs_are_evicted():
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
    keeps = cache(100)
    for key, nbytes in enumerate((60, 30, 10)):
        assert keeps.make_room(None, nbytes)
        keeps.keep(key, entry(nbytes))
    assert not keeps.make_room(None, 1)
    keeps.keep(0, entry(20))  # in the place of the 60
    assert keeps.nbytes == 60 and keeps.make_room(None, 40)
    keeps.drop(1)
    keeps.drop(1)
    assert keeps.nbytes == 30 and list(keeps.entries) == [2, 0]
    keeps.clear()
    assert keeps.nbytes == 0 and not keeps.entries


def test_one_that_is_larger_than_the_limit():
    """It is kept alone, and beside others if its size is known only once it is bound."""
    keeps = cache(100)
    assert keeps.make_room(None, 500)
    keeps.keep("large", entry(500))
    assert not keeps.make_room(None, 1) and keeps.make_room(1, 1)
    assert not keeps.entries
    keeps.keep("small", entry(99))
    assert keeps.make_room(None)
    assert not keeps.make_room(None, 2)


def test_calls_are_known_by_their_array():
    """A use counts as the second only with the same array, not with another of an equal key."""
    keeps, x = cache(100), np.zeros(3)
    assert use_at(keeps, 1, "call", x) is None
    assert use_at(keeps, 2, "call", x) == 1
    assert use_at(keeps, 3, "call", np.zeros(3)) is None  # another with the same key
    with pytest.raises(TypeError, match="unhashable"):
        use_at(keeps, 4, [], x)
    with pytest.raises(TypeError, match="weak reference"):
        use_at(keeps, 5, "call", 1.0)


def test_what_is_noted_is_bounded(monkeypatch):
    monkeypatch.setattr(programs, "MOST_USES", 64)
    keeps, held = cache(100), [np.zeros(1) for _ in range(300)]
    for key, x in enumerate(held):
        use_at(keeps, key, key, x)
        assert len(keeps._uses) <= 64
    assert use_at(keeps, 300, 299, held[299]) == 299
    del held, x
    gc.collect()
    for key in range(400, 600):
        use_at(keeps, key, key)
        assert len(keeps._uses) <= 64
