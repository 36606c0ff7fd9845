"""The race of every benchmark: contenders take turns, and the slowest rank's time counts.

Whatever else a machine does comes and goes within seconds.  So each iteration calls every contender
once, between barriers, in an order of its own::

    iteration 0    b | a | c        |: a barrier, or more of them
    iteration 1    c | a | b        the slowest rank's times, a median for each contender
    iteration 2    a | c | b
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import numpy as np

from ..communicator.communicator import Communicator
from .progress import advance
from .results import Row

WARM = 3  # calls before a race


def nothing() -> None:
    """Do nothing."""


Wait = Callable[[], object]
"""Waits until a device has done the work of the calls before; on the host that is nothing."""


@dataclass
class Contender:
    """What a race calls in each iteration, in a block of calls that is timed at once."""

    name: str
    act: Callable[[], object]
    prepare: Callable[[], object] = nothing  # called before each block, untimed
    warm: int | None = None  # calls before the race; None for 3
    # Whether those were enough; until it returns True there are more.
    ready: Callable[[], bool] = lambda: True
    # Calls directly before each block, where those of others would slow down the first.
    untimed: int = 0
    calls: int = 1  # of a block; the mean counts

    def warm_up(self) -> None:
        """Call `warm` times, and until it is ready."""
        done, enough = 0, WARM if self.warm is None else self.warm
        while done < enough or not self.ready():
            self.prepare()
            self.act()
            done += 1

    def block(self, wait: Wait = nothing) -> float:
        """Make the calls of a block, and `wait`; return this rank's mean seconds of a call."""
        begun = perf_counter()
        for _ in range(self.calls):
            self.act()
        wait()
        return (perf_counter() - begun) / self.calls

    def measure(self, comm: Communicator, wait: Wait = nothing) -> float:
        """Prepare, and time a block from a barrier on; return this rank's seconds; collective."""
        self.prepare()
        for _ in range(self.untimed):
            self.act()
        wait()
        comm.barrier()
        return self.block(wait)


T = TypeVar("T")


def in_turn(
    contenders: Sequence[T], iteration: int, measure: Callable[[T], Sequence[float]]
) -> list[Sequence[float]]:
    """Measure each contender once; return this rank's figures, in the order of `contenders`.

    The order of the calls is pseudo-random, not rotated, and equal on every rank: otherwise each
    contender would always follow the same other one, with what that left in the cache.
    """
    order = list(range(len(contenders)))
    random.Random(iteration).shuffle(order)
    figures = {k: measure(contenders[k]) for k in order}
    return [figures[k] for k in range(len(contenders))]


def race(
    comm: Communicator, contenders: Sequence[Contender], iterations: int, wait: Wait = nothing
) -> np.ndarray:
    """Warm up, and time each contender once in each iteration; collective.

    `wait` is called before each block, and at its end, within its time.  Return the slowest rank's
    seconds of a call: lines are iterations, columns are contenders.
    """
    for contender in contenders:
        contender.warm_up()
    times = np.empty((iterations, len(contenders)))
    names = ", ".join(contender.name for contender in contenders)
    for k in range(iterations):
        advance(f"step {k + 1} of {iterations}: {names}", k + 1, iterations)
        times[k] = np.ravel(in_turn(contenders, k, lambda c: (c.measure(comm, wait),)))
    # Once, after the loop: within it, the exchange would fill caches before the next call.
    return comm.allreduce(times, "max")


def medians(times: np.ndarray) -> list[float]:
    """Return the median of each column."""
    return [statistics.median(column) for column in times.T.tolist()]


def rows(
    comm: Communicator,
    work: str,
    contenders: Sequence[Contender],
    iterations: int,
    wait: Wait = nothing,
) -> list[Row]:
    """Race contenders; return a row of the median time for each; collective.

    A ratio is the first contender's time divided by the row's; for `wait` see :func:`race`.
    """
    every = medians(race(comm, contenders, iterations, wait))
    return [
        Row(work, contender.name, comm.size, 1e6 * seconds, every[0] / seconds)
        for contender, seconds in zip(contenders, every, strict=True)
    ]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collector: a collection during a call would count as its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:  # the program may run without it
            gc.enable()
