"""Symmetric memory: arrays that every rank of a node has at the same place and all can reach.

``comm.empty(shape, dtype)`` maps one file that exists in memory only and has no name, so that
nothing is left behind however the job ends.  A rank gives its mapping back when its own arrays on
it are dead, without asking the others: they have mappings of their own, of the parts of all ranks,
so they go on reading and writing until they drop theirs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import memory_file
from ..backends.waiting import SPINS
from ..calls.arrays import address, owner, view_at
from ..errors import InvalidArgument
from ..schedule.unrolled import SLOTS
from ..selection.rules import STAGING_BYTES
from .barrier import Lines

PAGE = 4096
_SKEW = 5 * 64  # a rank's part begins at another place in its page than the part before it


@dataclass(frozen=True)
class Place:
    """Where a flat array lies in an allocation, the same on every rank."""

    allocation: Allocation
    offset: int

    def views(self, count: int, dtype: np.dtype) -> list[np.ndarray]:
        """Give the array of every rank, by rank."""
        ranks = range(self.allocation.size)
        return [view_at(self.address(rank), count, dtype) for rank in ranks]

    def address(self, rank: int) -> int:
        """Give the address of the array of `rank`."""
        return self.allocation.address + rank * self.allocation.stride + self.offset

    def shadow(self, rank: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Give scratch memory as long as the array, on `rank`; all ranks reach it."""
        half = self.allocation.stride // 2
        return view_at(self.address(rank) + half, count, dtype)

    @property
    def key(self) -> str:
        """Name the place, for the ranks to see that they mean the same one."""
        return f"@{self.allocation.number}+{self.offset}"


@dataclass(eq=False)
class Allocation:
    """One mapping: `size` parts of `stride` bytes; the second half of a part is its shadow."""

    number: int
    address: int
    stride: int
    size: int
    rank: int
    holder: weakref.ref


class Heap:
    """The symmetric memory of one communicator whose ranks share a node.

    Parameters
    ----------
    rank, size : int
        Of the communicator.
    everyone : callable
        ``everyone(value)`` gives the values of all ranks; collective.
    patience : tuple of int
        Of a barrier, see :func:`~mpidist.backends.waiting.spin`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        everyone: Callable[[Any], list[Any]],
        patience: tuple[int, int] = SPINS,
    ):
        self.rank, self.size, self.everyone = rank, size, everyone
        self._patience = patience
        self._known: dict[int, Allocation] = {}  # by the identity of the memory's owner
        self._numbered: dict[int, Allocation] = {}
        self._made = 0
        self._lines: Lines | None = None
        self._staging: tuple[Allocation, np.ndarray] | None = None

    @property
    def lines(self) -> Lines:
        """The words by which the ranks meet."""
        assert self._lines is not None
        return self._lines

    def behind(self) -> tuple[int, ...]:
        """Give the ranks that have not come to the barrier that this rank came to last."""
        return () if self._lines is None else self._lines.behind()

    def make_lines(self) -> None:
        """Make the words by which the ranks meet, before anything that needs them; collective."""
        if self._lines is None:
            words = self._map(Lines.bytes_needed(self.size, SLOTS + 1)).data.cast("q")
            self._lines = Lines(words, self.rank, self.size, self._patience)

    def empty(self, dims: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Make an array on every rank; collective, all want the same.  The contents are zero."""
        self.make_lines()
        nbytes = math.prod(dims) * dtype.itemsize
        flat, made = self._allocate(max(nbytes, 1))
        mark = id(made.holder())
        number = made.number

        def forget(_: weakref.ref) -> None:
            self._known.pop(mark, None)
            self._numbered.pop(number, None)

        made.holder = weakref.ref(made.holder(), forget)
        self._known[mark] = self._numbered[number] = made
        first = self.rank * made.stride
        own = flat[first : first + nbytes]
        return own.view(dtype).reshape(dims)

    def make_staging(self) -> None:
        """Make the slots through which private arrays go, at the first use; collective.

        Raises
        ------
        MemoryError
            On every rank, if there is not so much shared memory.
        """
        if self._staging is None:
            self.make_lines()
            flat, made = self._allocate(2 * STAGING_BYTES)
            self._staging = (made, flat)

    @property
    def has_staging(self) -> bool:
        """Whether there are slots."""
        return self._staging is not None

    def slot(self, index: int) -> Place:
        """Give slot 0 or 1 of the staging memory."""
        assert self._staging is not None
        return Place(self._staging[0], index * STAGING_BYTES)

    def _allocate(self, nbytes: int) -> tuple[np.ndarray, Allocation]:
        """Map `nbytes` and as much of shadow for every rank."""
        stride = 2 * (-(-nbytes // PAGE) * PAGE) + 2 * _SKEW
        flat = self._map(stride * self.size)
        self._made += 1
        start = flat.__array_interface__["data"][0]
        ref = weakref.ref(owner(flat))
        return flat, Allocation(self._made, start, stride, self.size, self.rank, ref)

    def _map(self, nbytes: int) -> np.ndarray:
        """Map a new file of `nbytes` on every rank; if one cannot, none does and all raise."""
        wrong = ""
        for kind in memory_file.KINDS:
            made, mapping, mine = None, None, ""
            try:
                if self.rank == 0:
                    made, mine = _create(nbytes, kind)
                told = self.everyone(made)[0]
                if told is not None:
                    mapping, mine = _attach(told, nbytes)
                problems = [(r, text) for r, text in enumerate(self.everyone(mine)) if text]
            finally:
                if made is not None:
                    memory_file.remove(made)
            if not problems:
                assert mapping is not None
                return mapping
            wrong = "; ".join(f"on rank {r}: {text}" for r, text in problems)
        raise MemoryError(f"rank {self.rank}: {nbytes} bytes of shared memory: {wrong}")

    def find(self, x: np.ndarray | None) -> Place | None:
        """Give the place of a flat array, or None if it is private memory."""
        if x is None or not self._known:
            return None
        holder = owner(x)
        found = self._known.get(id(holder))
        if found is None and not isinstance(holder, np.ndarray):
            found, holder = self._around(address(x))  # it may be a tensor on an array of ours
        if found is None or found.holder() is not holder:
            return None
        if x.size == 0:
            return Place(found, 0)  # numpy gives an empty array no address of its own
        offset = address(x) - found.address - self.rank * found.stride
        inside = offset >= 0 and offset + x.nbytes <= found.stride // 2
        return Place(found, offset) if inside else None

    def _around(self, start: int) -> tuple[Allocation | None, object]:
        """Return the allocation that an address is in, on this rank, and the memory's owner."""
        for known in self._known.values():
            if 0 <= start - known.address - self.rank * known.stride < known.stride // 2:
                return known, known.holder()
        return None, None

    def place(self, number: int, offset: int) -> Place | None:
        """Give a place by its allocation's number, None if this rank has given that back."""
        known = self._numbered.get(number)
        return None if known is None or known.holder() is None else Place(known, offset)

    def key(self, x: np.ndarray) -> str:
        """Name the place of an array, the same on every rank; raise if it is private."""
        place = self.find(x) if isinstance(x, np.ndarray) else None
        if place is None:
            raise InvalidArgument(
                f"rank {self.rank}: free(x): x is not from empty() of this communicator, "
                "or is free already"
            )
        return place.key

    def forget(self, x: np.ndarray) -> None:
        """Treat the memory of `x` as private from now on; what is under way goes on in it."""
        self.key(x)
        place = self.find(x)
        assert place is not None
        del self._known[id(place.allocation.holder())]


def _create(nbytes: int, kind: str) -> tuple[str | None, str]:
    """Make a file; give it, and what went wrong."""
    try:
        return memory_file.create(nbytes, "symmetric", kind), ""
    except (MemoryError, OSError, OverflowError) as error:
        return None, str(error)


def _attach(made: str, nbytes: int) -> tuple[np.ndarray | None, str]:
    """Map a file; give the mapping, and what went wrong."""
    try:
        return memory_file.attach(made, nbytes), ""
    except (OSError, ValueError, OverflowError) as error:
        return None, str(error)
