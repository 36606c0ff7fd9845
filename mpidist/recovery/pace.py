"""How many commits apart the state is copied, so that copies take a small part of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

PART = 0.02  # of the time of a step
_FIRST_LOOK = 4  # commits: the first copies also allocate their memory


class Pace:
    """Copies at those commits of a generation that are due: the same ones on all ranks.

    ``exchange(value)`` returns the values of all ranks, and is collective; it is called at the
    commits 4, 8, 16, …, when the times of a step and of a copy are looked at.
    """

    # A copy of 5 ms, steps of 20 ms: from the look at commit 4 on every 13th is copied::
    #
    #     commit   1 2 3 4 5 6 7 8 9 … 13 … 16 … 26 …
    #     copied   x x x               x          x
    #     look           x       x           x
    #
    # The slowest rank counts.  A loss then costs as much as 1 / PART = 50 copies take, at most.

    def __init__(self, exchange: Callable[[tuple[float, float]], Iterable[tuple[float, float]]]):
        self.every, self._exchange = 1, exchange
        self.commits, self._look = 0, _FIRST_LOOK
        self._since, self._looked = time.perf_counter(), 0
        self._copying, self._shortest = 0.0, math.inf  # seconds, since the last look

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
        self._shortest = min(self._shortest, seconds)

    def _look_at_times(self) -> None:
        now = time.perf_counter()
        step = (now - self._since - self._copying) / (self.commits - self._looked)
        copy = self._shortest if self._shortest < math.inf else 0.0  # 0: none since the last look
        copies, steps = zip(*self._exchange((copy, step)))
        if max(copies):
            self.every = max(1, math.ceil(max(copies) / (PART * max(steps))))
        self._look, self._looked = 2 * self._look, self.commits
        self._since, self._copying, self._shortest = time.perf_counter(), 0.0, math.inf
