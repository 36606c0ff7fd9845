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

WARM_ROUNDS = 3
OURS = "mpidist DDP"


@dataclass(frozen=True)
class Contender:
    """One means to do the same work: `act` is timed, once `model` has chosen how it sends."""

    name: str
    act: Callable[[], object]
    model: DDP | None = None

    def warm_up(self) -> None:
        """Do the work until nothing changes any more."""
        for _ in range(WARM_ROUNDS):
            self.act()
        while self.model is not None and not self.model.reducer.settled:
            self.act()


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


def take_turns(comm: Any, contenders: Sequence[Contender], rounds: int) -> np.ndarray:
    """Give the seconds of each contender (columns) on the slowest rank, round by round.

    Their order is drawn for each round, the same on every rank.
    """
    times = np.empty((rounds, len(contenders)))
    for contender in contenders:
        contender.warm_up()
    draw = np.random.default_rng(0)  # in a fixed order each would follow the same other one
    for taken in times:
        for k in draw.permutation(len(contenders)):
            comm.barrier()
            began = perf_counter()
            contenders[k].act()
            taken[k] = perf_counter() - began
    return comm.allreduce(times, op="max")


def race(comm: Any, work: str, contenders: Sequence[Contender], rounds: int) -> list[Row]:
    """Let contenders take turns; the first is ours."""
    times = take_turns(comm, contenders, rounds)
    medians = [statistics.median(column) for column in times.T.tolist()]
    return [
        Row(work, contender.name, seconds, medians[0] / seconds)
        for contender, seconds in zip(contenders, medians, strict=True)
    ]


class Arrays:
    """A module of bare arrays of so many elements, whose gradients are there."""

    def __init__(self, sizes: Sequence[int]):
        self._arrays = [Parameter(np.zeros(size, np.float32)) for size in sizes]
        for p in self._arrays:
            p.grad = np.ones(p.data.size, np.float32)

    def parameters(self) -> list[Parameter]:
        """List the arrays."""
        return self._arrays


def communication(comm: Any, rounds: int, count: int = 240, elements: int = 1000) -> list[Row]:
    """Measure the averaging of many small gradients: in buckets, and each for itself."""
    ours, theirs = Arrays([elements] * count), Arrays([elements] * count)
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
