"""Symmetric memory: arrays that lie at the same place on every rank of a node, accessible to all.

``comm.empty(shape, dtype)`` maps one file that exists in memory only and has no name, so that
nothing is left behind however the job ends.  Every rank maps the parts of all ranks::

    part of rank 0             part of rank 1             …
    ┌────────────┬───────────┐┌────────────┬───────────┐
    │ array      │ shadow    ││ array      │ shadow    │   shadow: scratch memory of the kernels
    └────────────┴───────────┘└────────────┴───────────┘
    ├──────── stride ────────┤

A rank unmaps the file when its own arrays on it are dead, without asking the others: they have
mappings of their own, so they can read and write all parts until they unmap theirs.

The communicator's service has one `Heap`; the executors of this package find their arrays in it.
On several nodes each has a file of its own, and the ranks of a heap are numbered within the node::

    communicator   0  1  2 │ 3  4        on every node the same numbers of allocations,
    rank, peer     0  1  2 │ 0  1        because all nodes allocate, or fail, together
    file           ── A ── │ ─ B ─
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends import memory_file
from ..backends.tags import BANKS
from ..backends.waiting import SPINS
from ..calls.arrays import address, owner, view_at
from ..errors import InvalidArgument
from .barrier import BarrierLines

PAGE = 4096
STAGING_BYTES = 2 << 20  # size of each of the two slots of a rank
# A rank's part begins at another place in its page than the part before it: else an element would
# have the same low 12 bits of its address in all parts, and so compete for the same lines of a
# cache.  Measured with longer pieces and reads in a row only: allreduce of 1 MiB 93 µs, not 120.
_SKEW = 5 * 64


@dataclass(frozen=True)
class Location:
    """The location of a flat array in an Allocation of symmetric memory, the same on every rank.

    `offset` is in bytes, from the beginning of a rank's part of the allocation.
    """

    allocation: Allocation
    offset: int

    def views(self, count: int, dtype: np.dtype) -> list[np.ndarray]:
        """Return views of the arrays of the node's ranks at this location, as a list."""
        ranks = range(self.allocation.size)
        return [view_at(self.address(rank), count, dtype) for rank in ranks]

    def address(self, rank: int) -> int:
        """Return the address of the array of `rank`, in this process."""
        return self.allocation.address + rank * self.allocation.stride + self.offset

    def shadow(self, rank: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Return `count` elements of the shadow (shared scratch memory) of the array of `rank`."""
        half = self.allocation.stride // 2
        return view_at(self.address(rank) + half, count, dtype)

    @property
    def key(self) -> str:
        """Text that is equal on all ranks if they mean the same location."""
        return f"@{self.allocation.number}+{self.offset}"


@dataclass(eq=False)
class Allocation:
    """One mapped file: a part of `stride` bytes for each of `size` ranks."""

    number: int  # the same on every rank
    address: int  # of the mapping, in this process
    stride: int  # the second half of a rank's part is the shadow
    size: int
    rank: int  # this rank's index among those of the node
    owner_ref: weakref.ref  # to the mapping's owner, whose end unmaps the file


class Heap:
    """The symmetric memory of one communicator on this node.

    It is made from the rank in the communicator and the `ranks` on this node, in ascending order.
    All its methods, locations and barriers count these from 0, as the attributes `rank` and `size`
    do.  ``everyone(value)`` returns the values of all ranks, those of other nodes too; collective.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        everyone: Callable[[Any], list[Any]],
        patience: tuple[int, int] = SPINS,  # in a barrier, see backends.waiting.spin
    ):
        self.ranks = tuple(ranks)
        self.rank, self.size, self.everyone = self.ranks.index(rank), len(self.ranks), everyone
        self._patience = patience
        self._allocations: dict[int, Allocation] = {}  # by the identity of the memory's owner
        self._by_number: dict[int, Allocation] = {}
        self._last_number = 0
        self._lines: BarrierLines | None = None
        self._staging: tuple[Allocation, np.ndarray] | None = None

    @property
    def lines(self) -> BarrierLines:
        """The ranks' barrier counters and notes (words that a rank writes for the others)."""
        assert self._lines is not None
        return self._lines

    @property
    def has_lines(self) -> bool:
        """Whether there are :attr:`lines`, the same on every rank."""
        return self._lines is not None

    def missing(self) -> tuple[int, ...]:
        """Return the ranks (of the communicator) not yet at a barrier at which this rank waits."""
        missing = () if self._lines is None else self._lines.missing()
        return tuple(self.ranks[peer] for peer in missing)

    def make_lines(self) -> None:
        """Allocate the memory of :attr:`lines`, unless it exists; collective."""
        if self._lines is None:
            words = self._map(BarrierLines.bytes_needed(self.size, BANKS + 1)).data.cast("q")
            self._lines = BarrierLines(words, self.rank, self.size, self._patience)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Allocate a symmetric array; collective, with the same shape and dtype on every rank.

        It is filled with zeros, as ``comm.empty`` promises, without a pass over the memory: the
        system zeroes the pages of a new file.
        """
        self.make_lines()
        nbytes = math.prod(shape) * dtype.itemsize
        flat, allocation = self._allocate(max(nbytes, 1))
        owner_id = id(allocation.owner_ref())
        number = allocation.number

        def forget(_: weakref.ref) -> None:
            self._allocations.pop(owner_id, None)
            self._by_number.pop(number, None)

        allocation.owner_ref = weakref.ref(allocation.owner_ref(), forget)
        self._allocations[owner_id] = self._by_number[number] = allocation
        first = self.rank * allocation.stride
        own = flat[first : first + nbytes]
        return own.view(dtype).reshape(shape)

    def make_staging(self) -> None:
        """Allocate two staging slots of 2 MiB per rank, unless they exist; collective.

        Raises MemoryError on every rank if there is not enough shared memory.
        """
        if self._staging is None:
            self.make_lines()
            flat, allocation = self._allocate(2 * STAGING_BYTES)
            self._staging = (allocation, flat)

    def slot(self, index: int) -> Location:
        """Return the location of staging slot 0 or 1, of those that `make_staging` allocated."""
        assert self._staging is not None
        return Location(self._staging[0], index * STAGING_BYTES)

    def _allocate(self, nbytes: int) -> tuple[np.ndarray, Allocation]:
        """Map `nbytes` and as long a shadow (scratch memory) for each rank.

        Return the whole mapping, an array of bytes with all ranks' parts, and its Allocation.
        """
        stride = 2 * (-(-nbytes // PAGE) * PAGE) + 2 * _SKEW
        flat = self._map(stride * self.size)
        self._last_number += 1
        start = flat.__array_interface__["data"][0]
        ref = weakref.ref(owner(flat))
        return flat, Allocation(self._last_number, start, stride, self.size, self.rank, ref)

    def _map(self, nbytes: int) -> np.ndarray:
        """Map a new file of `nbytes` of this node on every rank; return it as an array of bytes.

        If one rank of any node cannot map its own, all raise MemoryError.
        """
        failure = ""
        # Two exchanges for each kind of file, in which all ranks take part, whatever failed; see
        # MpiBackend._make_board.  All end with the same kind, or with the same error.
        for kind in memory_file.KINDS:
            created, mapping, problem = None, None, ""
            try:
                if self.rank == 0:
                    created, problem = _create(nbytes, kind)
                name = self.everyone(created)[self.ranks[0]]
                if name is not None:
                    mapping, problem = _attach(name, nbytes)
                problems = [(r, text) for r, text in enumerate(self.everyone(problem)) if text]
            finally:
                if created is not None:
                    memory_file.remove(created)
            if not problems:
                assert mapping is not None
                return mapping
            failure = "; ".join(f"on rank {r}: {text}" for r, text in problems)
        raise MemoryError(
            f"rank {self.ranks[self.rank]}: cannot map {nbytes} bytes of shared memory: {failure}"
        )

    def find(self, x: np.ndarray | None) -> Location | None:
        """Return the location of a flat array of this rank; None if it is not in this heap.

        Also None where `x` is None, and after :meth:`forget`.
        """
        if x is None or not self._allocations:
            return None
        memory = owner(x)
        found = self._allocations.get(id(memory))
        if found is None and not isinstance(memory, np.ndarray):
            found, memory = self._containing(address(x))  # perhaps a tensor on a symmetric array
        if found is None or found.owner_ref() is not memory:
            return None
        if x.size == 0:
            return Location(found, 0)  # numpy gives an empty array no address of its own
        offset = address(x) - found.address - self.rank * found.stride
        inside = offset >= 0 and offset + x.nbytes <= found.stride // 2
        return Location(found, offset) if inside else None

    def holds(self, start: int) -> bool:
        """Return whether this rank's part of a symmetric array contains an address."""
        return bool(self._allocations) and self._containing(start)[1] is not None

    def _containing(self, start: int) -> tuple[Allocation | None, object]:
        """Return the allocation with address `start` in this rank's array, and its mapping's owner.

        Both are None if there is no such allocation.
        """
        for known in self._allocations.values():
            if 0 <= start - known.address - self.rank * known.stride < known.stride // 2:
                return known, known.owner_ref()
        return None, None

    def location(self, number: int, offset: int) -> Location | None:
        """Return the location at `offset` in allocation `number`, or None if unmapped here.

        `offset` is in bytes, from the beginning of a rank's part.
        """
        known = self._by_number.get(number)
        return None if known is None or known.owner_ref() is None else Location(known, offset)

    def key(self, x: np.ndarray) -> str:
        """Return the text of an array's location, equal on all ranks.

        Raises InvalidArgument, with the message of ``comm.free(x)``, if `x` is not in this heap.
        """
        location = self.find(x) if isinstance(x, np.ndarray) else None
        if location is None:
            raise InvalidArgument(
                f"rank {self.ranks[self.rank]}: free(x): x was not allocated by empty() of this "
                "communicator, or was freed"
            )
        return location.key

    def forget(self, x: np.ndarray) -> None:
        """Treat the memory of `x` as private from now on; pending operations may finish in it."""
        self.key(x)
        location = self.find(x)
        assert location is not None
        # It stays in `_by_number`, by which pending operations still find it.
        del self._allocations[id(location.allocation.owner_ref())]


def _create(nbytes: int, kind: str) -> tuple[str | None, str]:
    """Create a memory file; return its name and "", or None and the error's message."""
    try:
        return memory_file.create(nbytes, "symmetric", kind), ""
    except (MemoryError, OSError, OverflowError) as error:
        return None, str(error)


def _attach(name: str, nbytes: int) -> tuple[np.ndarray | None, str]:
    """Map a memory file; return the mapping and "", or None and the error's message."""
    try:
        return memory_file.attach(name, nbytes), ""
    except (OSError, ValueError, OverflowError) as error:
        return None, str(error)
