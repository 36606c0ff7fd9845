"""What is measured: arrays that differ before every call, and what must come out of it.

All data are windows of one pseudo-random sequence g of small whole numbers.  A *turn* slides every
window on by one, on all ranks alike, so that no call finds what an earlier one has left.  Where
ranks are combined, rank r brings g[t+7r …], so the result is a window of E[i] = g[i] ∘ g[i+7] ∘
g[i+14] ∘ …, computed once.  Filling and checking are one pass over memory each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InvalidRank
from ..operations import Op, check_defined, find_op
from ..schedule.contract import COLLECTIVES
from .data import combine, rounded_total, sequence, span
from .layout import LAYOUT, STRIDE

TURNS = 61  # windows before they repeat

_CHUNK = 1 << 15  # elements that are checked at a time: what is compared stays in the cache

Bounds = tuple[np.ndarray, np.ndarray]
Window = tuple[np.ndarray, np.ndarray, int]  # memory, sequence, where in the sequence it begins


@dataclass
class Case:
    """One collective of one size on one rank.

    Attributes
    ----------
    x, out : ndarray or None
        What is passed; None where this rank has no part.
    nbytes : int
        Bytes of the whole buffer.
    sources, expected : list of (ndarray, ndarray, int)
        What to fill before a call, and what must hold after it: memory and where its window begins.
    bare_expected : list, optional
        The same for the bare MPI call, where it leaves its result elsewhere.
    bounds : tuple of ndarray, optional
        Least and largest result allowed, place by place; by default it must be exact.
    """

    collective: str
    rank: int
    size: int
    root: int
    op: Op | None
    x: Any
    out: Any
    nbytes: int
    in_place: bool
    sources: list[Window] = field(default_factory=list)
    expected: list[Window] = field(default_factory=list)
    bare_expected: list[Window] | None = None
    bounds: Bounds | None = None

    def fill(self, turn: int) -> None:
        """Write this turn's data."""
        at = turn % TURNS
        for memory, numbers, begin in self.sources:
            np.copyto(memory, numbers[begin + at : begin + at + memory.size])

    def check(self, turn: int, bare: bool = False) -> bool:
        """Tell whether this turn's result is right."""
        at = turn % TURNS
        windows = self.bare_expected if bare and self.bare_expected is not None else self.expected
        return all(
            self._right(memory[k : k + _CHUNK], begin + at + k, numbers)
            for memory, numbers, begin in windows
            for k in range(0, memory.size, _CHUNK)
        )

    def _right(self, memory: np.ndarray, at: int, numbers: np.ndarray) -> bool:
        window = slice(at, at + memory.size)
        if self.bounds is None:
            return bool((memory == numbers[window]).all())
        low, high = self.bounds
        return bool((memory >= low[window]).all() and (memory <= high[window]).all())


class Workload:
    """The cases of one collective on one rank, of any size up to a largest, in the same memory.

    Parameters
    ----------
    collective : str
        Which.
    rank, size, root : int
        Of the communicator.
    largest : int
        Bytes of the largest buffer.
    dtype : dtype
        Of the elements.
    op : str
        For collectives that reduce.
    in_place : bool
        Give the result the memory of the input.
    data : ndarray, optional
        Real numbers to take instead of g, repeated as often as needed; results may then differ from
        E by the rounding of the sum.
    """

    def __init__(
        self,
        collective: str,
        rank: int,
        size: int,
        root: int,
        largest: int,
        dtype: Any,
        op: str = "sum",
        in_place: bool = False,
        data: np.ndarray | None = None,
    ):
        self.collective, self.rank, self.size, self.root = collective, rank, size, root
        self.dtype, self.in_place = np.dtype(dtype), in_place or collective == "broadcast"
        if not 0 <= root < size:
            raise InvalidRank(root, size, "root", rank)
        self._turn = 0
        contract = COLLECTIVES[collective]
        self.op = find_op(op) if contract.reduces and not contract.idempotent else None
        if self.op is not None:
            check_defined(self.op, self.dtype, rank)
        count = self.count(largest)
        extra = TURNS + STRIDE * size * (size if collective == "alltoall" else 1)
        self.memory = np.zeros(count, self.dtype)
        self.other = np.zeros(0 if self.in_place else count, self.dtype)
        if data is not None:
            self.g = np.resize(data.astype(self.dtype, copy=False), count + extra)
        else:
            self.g = sequence(count + extra, span(self.dtype, size, op), self.dtype, op, size)
        self.bounds: Bounds | None = None
        if self.op is None:
            self.e = self.g
        elif data is not None:
            self.bounds = rounded_total(self.g, size, count + TURNS, STRIDE)
            self.e = self.bounds[0]
        else:
            self.e = combine(self.op, self.g, size, count + TURNS, STRIDE)

    def elsewhere(self, empty: Callable[[int, np.dtype], np.ndarray]) -> Workload:
        """Give the same workload in other memory; the numbers are shared.

        Parameters
        ----------
        empty : callable
            Gives an array of so many elements of a dtype, such as ``comm.empty``.
        """
        other = copy.copy(self)
        other.memory = empty(self.memory.size, self.dtype)
        other.other = empty(self.other.size, self.dtype)
        return other

    def next_turn(self) -> int:
        """Give the number of the next turn: no two calls in a row have the same data."""
        self._turn += 1
        return self._turn

    def count(self, nbytes: int) -> int:
        """Give the elements of the whole buffer, rounded up to a multiple of the ranks."""
        count = -(-nbytes // self.dtype.itemsize)
        if COLLECTIVES[self.collective].per_rank:
            count = -(-count // self.size) * self.size
        return 0 if self.collective == "barrier" else count

    def case(self, nbytes: int) -> Case:
        """Give the case of a size."""
        n = self.count(nbytes)
        case = Case(
            self.collective,
            self.rank,
            self.size,
            self.root,
            self.op,
            self.memory[:n],
            self.memory[:n] if self.in_place else self.other[:n],
            n * self.dtype.itemsize,
            self.in_place,
            bounds=self.bounds,
        )
        LAYOUT[self.collective](case, self.g, self.e, n // self.size)
        return case
