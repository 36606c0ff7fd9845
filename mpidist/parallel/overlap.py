"""Which way of overlapping communication with backward is taken: the one that measures best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgument, Unsupported
from .progress import WAYS

ROUNDS = 5  # the first one warms up
GAIN = 0.95  # an overlap must bring a step below this share of the time without
WINS = 0.75  # and be the faster one in this share of the rounds


class Trial:
    """Steps of a training, each in one of several ways, in turn.

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
        self._seconds: list[float] = []

    @property
    def current(self) -> str:
        """The way of the next step."""
        return self._names[len(self._seconds) % len(self._names)]

    @property
    def over(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._seconds) >= ROUNDS * len(self._names)

    def note(self, seconds: float) -> None:
        """Take down what the step took."""
        self._seconds.append(seconds)

    def decide(self, comm: Any) -> tuple[str, dict[str, float]]:
        """Give the best way and the time of each, equal on all ranks; collective.

        A step takes as long as on its slowest rank; a time is the median over the steps.
        """
        mine = np.array(self._seconds).reshape(ROUNDS, len(self._names))[1:]
        rounds = comm.allreduce(mine, op="max")
        medians = [statistics.median(column) for column in rounds.T.tolist()]
        best = int(np.argmin(medians))
        wins = float((rounds[:, best] < rounds[:, 0]).mean())
        gains = medians[best] < GAIN * medians[0] and wins >= WINS
        times = dict(zip(self._names, medians, strict=True))
        return self._names[best if gains else 0], times


def candidates(comm: Any, overlap: str, buckets: int, on_device: bool = False) -> list[str]:
    """Give the ways that `overlap` leaves to be tried; the only one if it names one.

    With gradients on a GPU nothing is tried, for the host's clock does not see when they come.

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
    threads = comm.backend.threads
    if overlap == "thread" and not threads:
        raise Unsupported(
            f"rank {comm.rank}: overlap='thread': MPI was not started with thread level 'multiple'"
        )
    if on_device and overlap == "thread":
        raise Unsupported(
            f"rank {comm.rank}: overlap='thread': the gradients are on a GPU, in the order of this "
            "thread's streams: allowed are 'auto', 'none' and 'polls'"
        )
    if overlap != "auto":
        return [overlap]
    if on_device:
        return ["polls" if comm.size > 1 and comm._gpu.uses_nccl else "none"]
    if buckets < 2 or comm.size == 1:  # the last bucket is complete when backward is over
        return ["none"]
    return [name for name in WAYS if name != "thread" or threads]
