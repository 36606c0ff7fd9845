"""Symmetric memory: arrays that every rank of a node has at the same place and all can reach.

``comm.empty(shape, dtype)`` maps one file that exists in memory only; it is unlinked as soon as all
ranks have opened it, so that nothing is left behind however the job ends.  A rank gives its mapping
back when its own arrays on it are dead, without asking the others.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from .arrays import address, owner
from .backends import memory_file
from .errors import InvalidArgument
from .storage import view_at

PAGE = 4096
_WORDS = 8  # int64 per rank: one cache line


@dataclass(frozen=True)
class Place:
    """Where a flat array lies in an allocation, the same on every rank."""

    allocation: Allocation
    offset: int

    def views(self, count: int, dtype: np.dtype) -> list[np.ndarray]:
        """Give the array of every rank, by rank."""
        a = self.allocation
        return [
            view_at(a.address + r * a.stride + self.offset, count, dtype) for r in range(a.size)
        ]

    def shadow(self, rank: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Give scratch memory as long as the array, on `rank`; all ranks reach it."""
        a = self.allocation
        return view_at(a.address + rank * a.stride + a.stride // 2 + self.offset, count, dtype)

    @property
    def key(self) -> str:
        """Name the place, for the ranks to see that they mean the same one."""
        return f"@{self.allocation.number}+{self.offset}"


@dataclass(frozen=True, eq=False)
class Allocation:
    """One mapping: `size` parts of `stride` bytes; the second half of a part is its shadow."""

    number: int
    address: int
    stride: int
    size: int
    rank: int
    holder: weakref.ref


class Barrier:
    """A round in which nothing moves: over when every rank has started it.

    One word per rank counts the barriers that it has come to.  It is a Transfer, so kernels are
    programs like all others.  Numpy's stores are ordered before the flag on x86; elsewhere a lock's
    release and acquire order them.
    """

    __slots__ = ("_words", "_mine", "_others", "_count", "_lock")

    def __init__(self, words: memoryview, rank: int, size: int):
        self._words, self._mine = words, rank * _WORDS
        self._others = tuple(r * _WORDS for r in range(size) if r != rank)
        self._count, self._lock = 0, Lock()

    def start(self) -> None:
        """Tell the others that this rank has come."""
        with self._lock:
            self._count += 1
        self._words[self._mine] = self._count

    def test(self) -> bool:
        """Tell whether all have come."""
        words, count = self._words, self._count
        for other in self._others:
            if words[other] < count:
                return False
        with self._lock:
            return True


class Heap:
    """The symmetric memory of one communicator whose ranks share a node.

    Parameters
    ----------
    rank, size : int
        Of the communicator.
    tell, meet : callable
        ``tell(value)`` broadcasts an object from rank 0; ``meet()`` waits until all have come.
    """

    def __init__(self, rank: int, size: int, tell: Callable[[Any], Any], meet: Callable[[], Any]):
        self.rank, self.size, self._tell, self._meet = rank, size, tell, meet
        self._known: dict[int, Allocation] = {}
        self._made = 0
        self.barrier: Barrier | None = None

    def empty(self, shape: Sequence[int] | int, dtype: Any) -> np.ndarray:
        """Make an array on every rank; collective.  The contents are zero."""
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise InvalidArgument(f"rank {self.rank}: dtype {dtype} cannot lie in shared memory")
        dims = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if any(not isinstance(n, (int, np.integer)) or n < 0 for n in dims):
            raise InvalidArgument(
                f"rank {self.rank}: shape={shape!r}: whole numbers >= 0 are allowed"
            )
        if self.barrier is None:
            words = memoryview(self._map(_WORDS * 8 * self.size)).cast("q")
            self.barrier = Barrier(words, self.rank, self.size)
        count = int(np.prod(dims, dtype=np.int64))
        half = -(-max(count * dtype.itemsize, 1) // PAGE) * PAGE
        mapping = self._map(2 * half * self.size)
        self._made += 1
        flat = np.frombuffer(mapping, np.uint8)
        start = flat.__array_interface__["data"][0]
        holder = owner(flat)
        mark = id(holder)
        ref = weakref.ref(holder, lambda _: self._known.pop(mark, None))
        self._known[mark] = Allocation(self._made, start, 2 * half, self.size, self.rank, ref)
        first = self.rank * 2 * half
        own = flat[first : first + count * dtype.itemsize]
        return own.view(dtype).reshape(dims)

    def _map(self, nbytes: int) -> mmap.mmap:
        """Map a new file of `nbytes` on every rank."""
        made: str | MemoryError = ""
        if self.rank == 0:
            try:
                made = memory_file.create(nbytes, "symmetric")
            except MemoryError as error:
                made = error
        made = self._tell(made)
        if isinstance(made, MemoryError):
            raise MemoryError(f"rank {self.rank}: {made}")
        mapping = memory_file.attach(made, nbytes)
        self._meet()
        if self.rank == 0:
            os.unlink(made)
        return mapping

    def find(self, x: np.ndarray | None) -> Place | None:
        """Give the place of a flat array, or None if it is private memory."""
        if x is None or not self._known:
            return None
        holder = owner(x)
        found = self._known.get(id(holder))
        if found is None or found.holder() is not holder:
            return None
        if x.size == 0:
            return Place(found, 0)  # numpy gives an empty array no address of its own
        offset = address(x) - found.address - self.rank * found.stride
        inside = offset >= 0 and offset + x.nbytes <= found.stride // 2
        return Place(found, offset) if inside else None

    def forget(self, x: np.ndarray) -> None:
        """Treat the memory of `x` as private from now on."""
        place = self.find(x.reshape(-1) if x.flags.c_contiguous else x)
        if place is None:
            raise InvalidArgument(
                f"rank {self.rank}: free(x): x is not from empty() of this communicator"
            )
        self._known.pop(id(owner(x)), None)
