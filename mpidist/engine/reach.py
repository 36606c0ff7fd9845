"""The buffers of a schedule in shared memory: this rank's, and how it reaches those of the others.

===============  ==================================================================================
array of numpy   this rank's own, or mapped: symmetric memory at one location, slots
:class:`Noted`   mapped, at the location that its rank notes in each call: symmetric memory that
                 only the root has, or in parts
:class:`Far`     in another process, which the system copies: its rank notes the address
===============  ==================================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.process_memory import ProcessMemory
from ..backends.program import Action
from ..calls.arrays import address, view_at
from ..errors import InvalidArgument, RankFailed
from ..shared_memory.fold import PIECE_BYTES
from ..shared_memory.heap import Heap, Location
from .layout import ARGUMENT, Key

# note            0           1    2    3      4       5      6
# symmetric       unreached             in: number,   out: number, offset    (here, and rooted.py)
# single copies               in   out  tmp    rest           addresses      (single_copy.py)
NOTES = {"in": 3, "out": 5}
"""A rank's notes on symmetric memory: allocation number and offset of each buffer."""


class Noted:
    """An array of another rank, at the location that this rank has noted.

    `at` is the place of the rank of `key` on the node, `rank` is this one.
    """

    def __init__(self, heap: Heap, key: Key, at: int, rank: int, count: int, dtype: np.dtype):
        self._heap, self._key, self._at, self._rank = heap, key, at, rank
        self._count, self._dtype = count, dtype
        self._location: Location | None = None
        self.noted = (0, 0)  # allocation number and offset, by which it was found
        self.array: Any = None  # None before `find`, and where this rank cannot reach it

    def indices(self, bank: list[int]) -> tuple[int, int]:
        """Return the indices in ``heap.lines.words`` of the two notes."""
        first = self._heap.lines.note_index(bank, self._at) + NOTES[self._key[1]]
        return first, first + 1

    def find(self, bank: list[int]) -> bool:
        """Find the array again; return whether it is another one.

        A view is made only if it has moved: making one takes 3 µs, or 15 if the caches are cold.
        """
        words, (number, offset) = self._heap.lines.words, self.indices(bank)
        noted, before = (words[number], words[offset]), self.array
        if noted == self.noted and before is not None and self.memory() is not None:
            return False
        self.noted, self._location = noted, self._heap.location(*noted)
        location, self.array = self._location, None
        if location is not None:
            self.array = view_at(location.address(self._at), self._count, self._dtype)
        return self.array is not before

    def memory(self) -> Any:
        """Return the owner of the memory that has the array; None if it is gone."""
        return None if self._location is None else self._location.allocation.owner_ref()

    def check(self) -> None:
        """Raise InvalidArgument if this rank cannot reach the array."""
        if self.array is None:
            owner, buffer = self._key
            raise InvalidArgument(
                f"rank {self._rank}: {ARGUMENT[buffer]} of rank {owner} is in an array of "
                f"comm.empty() that rank {self._rank} has dropped; expected that each rank keeps "
                "its own"
            )


class Far:
    """An array of another process: its address in the current call is ``addresses[key]``."""

    def __init__(self, memory: ProcessMemory, rank: int, addresses: dict[Key, int], key: Key):
        self._memory, self._rank, self._addresses, self._key = memory, rank, addresses, key

    def fetch(self, start: int, target: np.ndarray) -> Action:
        """Return the action that copies the elements from `start` on into `target`."""
        addresses, key, read, rank = self._addresses, self._key, self._memory.read, self._rank
        offset, to, nbytes = start * target.itemsize, address(target), target.nbytes

        def action() -> None:
            try:
                read(key[0], addresses[key] + offset, to, nbytes)
            except OSError as error:
                raise RankFailed(
                    f"rank {rank}: rank {key[0]} has left in the middle of the operation, or has "
                    f"freed its array: {error.strerror}",
                    ranks=(key[0],),
                ) from error

        return action


class PieceScratch:
    """Scratch memory for pieces of other processes' arrays, which all programs share in turn.

    So it stays in the cache.
    """

    def __init__(self) -> None:
        self._memory = np.empty(PIECE_BYTES, np.uint8)

    def pieces(self, number: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for `number` pieces of `count` elements."""
        nbytes = number * count * dtype.itemsize
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(dtype).reshape(number, count)
