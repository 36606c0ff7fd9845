"""``mpidist bench ddp``: steps of training, and the communication in them, by several means."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..nn import Parameter
from ..parallel import DDP

WARM_ROUNDS = 20  # the wrapper tries its ways of overlapping in the first steps
OURS = "mpidist DDP"


@dataclass(frozen=True)
class Contender:
    """One means to do the same work: `act` is timed."""

    name: str
    act: Callable[[], object]


@dataclass(frozen=True)
class Row:
    """What one contender took.

    Attributes
    ----------
    work, name : str
        What was done, and by which means.
    seconds : float
        Median over the rounds of the time on the slowest rank.
    ratio : float
        The time of our wrapper over this one: below 1 ours is faster.
    """

    work: str
    name: str
    seconds: float
    ratio: float

    def as_json(self) -> dict[str, Any]:
        """Give it as a dict."""
        return asdict(self)


def race(comm: Any, work: str, contenders: Sequence[Contender], rounds: int) -> list[Row]:
    """Let contenders take turns; the first is ours."""
    times = np.empty((rounds, len(contenders)))
    for contender in contenders:
        for _ in range(WARM_ROUNDS):
            contender.act()
    for taken in times:
        for k, contender in enumerate(contenders):
            comm.barrier()
            began = perf_counter()
            contender.act()
            taken[k] = perf_counter() - began
    slowest = comm.allreduce(times, op="max")
    medians = [statistics.median(column) for column in slowest.T.tolist()]
    return [
        Row(work, contender.name, seconds, medians[0] / seconds)
        for contender, seconds in zip(contenders, medians, strict=True)
    ]


class Arrays:
    """A module of bare arrays, whose gradients are there."""

    def __init__(self, count: int, elements: int):
        self._arrays = [Parameter(np.zeros(elements, np.float32)) for _ in range(count)]
        for p in self._arrays:
            p.grad = np.ones(elements, np.float32)

    def parameters(self) -> list[Parameter]:
        """List the arrays."""
        return self._arrays


def communication(comm: Any, rounds: int, count: int = 240, elements: int = 1000) -> list[Row]:
    """Measure the averaging of many small gradients: in buckets, and each for itself."""
    ours, theirs = Arrays(count, elements), Arrays(count, elements)
    model = DDP(ours, comm, overlap="none")

    def one_by_one() -> None:
        for p in theirs.parameters():
            comm.allreduce(p.grad, op="mean", out=p.grad)

    contenders = [
        Contender(OURS, model.sync_gradients),
        Contender("one allreduce per parameter", one_by_one),
    ]
    work = f"communication, {count} gradients of {elements} float32"
    return race(comm, work, contenders, rounds)
