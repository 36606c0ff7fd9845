"""Going through collectives, kinds of memory and sizes within a budget of time."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..selection.tuning import MEMORIES, PRIVATE
from .cases import Workload

ROOT_WEIGHT = 1 << 20  # bytes whose size needs twice the time of an empty one


@dataclass(frozen=True)
class Wish:
    """What is to be gone through.

    Parameters
    ----------
    collectives : sequence of str
        Which.
    sizes : sequence of int
        Bytes of the whole buffer, ascending.
    dtype : dtype
        Of the elements.
    budget : float
        Seconds for all together.
    """

    collectives: Sequence[str]
    sizes: Sequence[int]
    dtype: Any = "float32"
    budget: float = 60.0


@dataclass(frozen=True)
class Cell:
    """One collective at one size in one kind of memory, and when its time is over."""

    collective: str
    memory: str
    nbytes: int
    works: dict[str, Workload]
    until: float


class Stop:
    """Whether the user wants it to end: Ctrl-C, or a launcher that ends the job."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self) -> bool:
        """Tell whether it was asked for."""
        return self.wanted

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM instead of dying of them; a second one ends the process."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, frame: Any) -> None:
            self.wanted = True
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def memories(comm: Any, collective: str) -> tuple[str, ...]:
    """Give the kinds of memory that a collective can have its arrays in, here."""
    possible = comm.topology.num_nodes == 1 and comm.backend.native is not None
    return MEMORIES if possible and collective != "barrier" else (PRIVATE,)


def count_cells(comm: Any, wish: Wish) -> int:
    """Give the number of cells of a wish."""
    sizes = {c: 1 if c == "barrier" else len(wish.sizes) for c in wish.collectives}
    return sum(len(memories(comm, c)) * sizes[c] for c in wish.collectives)


def cells(
    comm: Any, wish: Wish, stopped: Callable[[], bool], cost: Callable[[Cell], float]
) -> Iterator[Cell]:
    """Give one cell after the other, each with its share of the budget; the same on every rank.

    Collectives and kinds of memory share the budget equally, sizes by the root of their bytes.
    What one leaves goes to the others.  What there is no time for any more is left out.

    Parameters
    ----------
    comm : Communicator
        Collective.
    wish : Wish
        What and how long.
    stopped : callable
        Tells on rank 0 whether to end.
    cost : callable
        Gives the seconds that a cell takes at the least; rank 0's counts.
    """
    end = perf_counter() + wish.budget
    groups = [(c, memory) for c in wish.collectives for memory in memories(comm, c)]
    work: Workload | None = None
    for index, (collective, memory) in enumerate(groups):
        share = perf_counter() + (end - perf_counter()) / (len(groups) - index)
        sizes = [0] if collective == "barrier" else sorted(wish.sizes)
        if work is None or work.collective != collective:
            work = Workload(collective, comm.rank, comm.size, 0, max(sizes), wish.dtype)
        place = work if memory == PRIVATE else work.elsewhere(comm.empty)
        weights = [1 + (nbytes / ROOT_WEIGHT) ** 0.5 for nbytes in sizes]
        for k, nbytes in enumerate(sizes):
            now = perf_counter()
            until = now + max(share - now, 0.0) * weights[k] / sum(weights[k:])
            cell = Cell(collective, memory, nbytes, {memory: place}, until)
            if _agree(comm, stopped() or now + cost(cell) > end):
                break
            yield cell


def _agree(comm: Any, value: bool) -> bool:
    """Bring rank 0's verdict to all."""
    return bool(comm.broadcast(np.array([value], np.int8), root=0)[0])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the collection of garbage out of the times."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
