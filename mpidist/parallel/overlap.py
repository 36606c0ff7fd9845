"""Which way of overlapping communication with backward is taken: the one that measures best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgument, Unsupported
from .progress import WAYS

ROUNDS = 5  # the first one warms up
GAIN = 0.97  # an overlap must bring a step below this share of the time without


class Trial:
    """The first steps of a training, each in one of several ways, in turn.

    Parameters
    ----------
    names : sequence of str
        The ways; the first is the one without overlap.

    Attributes
    ----------
    current : str
        The way of the next step.
    over : bool
        Whether enough steps were measured.
    """

    def __init__(self, names: Sequence[str]):
        self._names = list(names)
        self._seconds: dict[str, list[float]] = {name: [] for name in names}
        self._count = 0

    @property
    def current(self) -> str:
        """The way of the next step."""
        return self._names[self._count % len(self._names)]

    @property
    def over(self) -> bool:
        """Whether enough steps were measured."""
        return self._count >= ROUNDS * len(self._names)

    def note(self, seconds: float) -> None:
        """Take down what the step took."""
        self._seconds[self.current].append(seconds)
        self._count += 1

    def decide(self, comm: Any) -> tuple[str, dict[str, float]]:
        """Give the best way and the time of each on the slowest rank, equal on all; collective."""
        medians = [statistics.median(self._seconds[name][1:]) for name in self._names]
        slowest = comm.allreduce(np.array(medians), op="max")
        times = dict(zip(self._names, slowest.tolist(), strict=True))
        best = min(times, key=lambda name: times[name])
        without = self._names[0]
        return (best if times[best] < GAIN * times[without] else without), times


def candidates(comm: Any, overlap: str, buckets: int) -> list[str]:
    """Give the ways that `overlap` leaves to be tried; the only one if it names one.

    Raises
    ------
    InvalidArgument
        If there is no such way.
    Unsupported
        If a thread is asked for and MPI does not allow calls from several.
    """
    if overlap not in ("auto", *WAYS):
        allowed = ", ".join(map(repr, ("auto", *WAYS)))
        raise InvalidArgument(f"rank {comm.rank}: overlap={overlap!r}: allowed are {allowed}")
    threads = getattr(comm.backend, "threads", True)
    if overlap == "thread" and not threads:
        raise Unsupported(
            f"rank {comm.rank}: overlap='thread': MPI was not started with thread level 'multiple'"
        )
    if overlap != "auto":
        return [overlap]
    if buckets < 2 or comm.size == 1:  # the last bucket is complete when backward is over
        return ["none"]
    return [name for name in WAYS if name != "thread" or threads]
