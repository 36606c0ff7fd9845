"""How many commits apart the state is copied, so that copies take a small part of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

PART = 0.02  # of the time of a step
_LOOKS = 64  # commits between two looks at most: steps may become slower


class Pace:
    """Copies at those commits of a generation that are due: the same ones on all ranks.

    ``exchange(value)`` returns the values of all ranks, and is collective; it is called when the
    times of a step and of a copy are looked at.  The first copy has taken `seconds`.
    """

    # A copy of 5 ms, steps of 20 ms: every 13th commit is copied::
    #
    #     commit   1 2 3 4 5 6 7 8 9 … 13 … 16 … 26 …
    #     look     x x   x       x           x
    #     copied                       x          x
    #
    # The slowest rank counts.  A loss then costs as much as 1 / PART = 50 copies take, where steps
    # take equally long.  A program that fails at one step is soon started from one copy, again and
    # again, by which mpidist run sees that there is no progress: so none is made before it is due.

    def __init__(
        self,
        exchange: Callable[[tuple[float, float]], Iterable[tuple[float, float]]],
        seconds: float,
    ):
        self.every, self.commits = 1, 0
        self._exchange, self._look, self._looked = exchange, 1, 0
        self._since, self._copying = time.perf_counter(), 0.0  # seconds of copies since then
        self._shortest = seconds  # copy; of those since the last look, if there were any
        self._new = math.inf

    def commit(self, copy: Callable[[], object]) -> None:
        """Call ``copy()`` if it is due at this commit."""
        self.commits += 1
        if self.commits == self._look:
            self._look_at_times()
        if self.commits % self.every:
            return
        begin = time.perf_counter()
        copy()
        seconds = time.perf_counter() - begin
        self._copying += seconds
        self._new = min(self._new, seconds)

    def _look_at_times(self) -> None:
        step = (time.perf_counter() - self._since - self._copying) / (self.commits - self._looked)
        if self._new < math.inf:
            self._shortest, self._new = self._new, math.inf
        copies, steps = zip(*self._exchange((self._shortest, step)))
        self.every = max(1, math.ceil(max(copies) / (PART * max(steps))))
        self._looked, self._look = self.commits, self.commits + min(self.commits, _LOOKS)
        self._since, self._copying = time.perf_counter(), 0.0
