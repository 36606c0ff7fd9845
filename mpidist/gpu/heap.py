"""Symmetric memory on the GPUs of a node, shared by CUDA IPC.

Every rank can access the arrays of all ranks.  Each array has an allocation of its own, not from a
pool, because an IPC handle stands for a whole allocation.  All ranks release it together, in
``comm.free(x)`` or with the communicator: no other rank may have memory open when its owner
releases it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.array import DeviceArray
from ..device.base import Device
from ..errors import InvalidArgument, Unsupported

GRAIN = 2 << 20  # bytes; the driver's smallest allocation
FLAGS = 1 << 12  # bytes of the barrier's counters, in an allocation of their own
SLOT_BYTES = 32 << 20  # of each of a rank's two slots, by which private arrays go

_WORD = 4  # bytes of a counter
_COUNT_LIMIT = 1 << 32


class DevicePart:
    """The part of an allocation that is in this rank's memory.

    Once all ranks have `left` the allocation, after a loss, it is released with its last array.
    """

    def __init__(self, device: Device, pointer: int):
        self._device, self._pointer, self.left = device, pointer, False

    def release(self) -> None:
        """Release the memory."""
        pointer, self._pointer = self._pointer, 0
        self._device.release_shared(pointer)

    def __del__(self) -> None:
        if self.left and self._pointer:
            with suppress(Exception):  # the driver may have been shut down with the interpreter
                self.release()


@dataclass(frozen=True)
class DeviceAllocation:
    """One symmetric allocation: a part of `nbytes` on every rank's GPU.

    `number` is the same on every rank; `pointers` are the addresses of the parts in this process,
    `part` is this rank's.
    """

    number: int
    nbytes: int
    pointers: tuple[int, ...]
    part: DevicePart


@dataclass(frozen=True)
class DeviceLocation:
    """The location of an array in a symmetric allocation, in bytes from the start of a rank's part.

    It is the same on every rank.
    """

    allocation: DeviceAllocation
    offset: int

    @property
    def key(self) -> str:
        """The location as text, such as "@2+512", which ranks compare."""
        return f"@{self.allocation.number}+{self.offset}"


class DeviceHeap:
    """The symmetric device memory of one communicator."""

    def __init__(self, device: Device, rank: int, size: int, everyone: Callable[[Any], list[Any]]):
        self.device, self.rank, self.size, self._everyone = device, rank, size, everyone
        self._allocations: list[DeviceAllocation] = []
        self._last_number = 0
        self.flags: DeviceAllocation | None = None
        self._slots: DeviceAllocation | None = None
        self._count = 0  # of barriers
        # After the last barrier: its stream may be gone by the next one, and its number another's.
        self.last = device.event()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return this rank's array of zeros in a new allocation; collective, equal arguments."""
        self._make_flags()
        allocation = self._allocate(math.prod(shape) * dtype.itemsize)
        self._allocations.append(allocation)
        return self.device.wrap(allocation.pointers[self.rank], shape, dtype, allocation.part)

    def make_slots(self) -> None:
        """Allocate the two slots of every rank; collective, Unsupported on all if one cannot."""
        self._make_flags()
        self._slots = self._allocate(2 * SLOT_BYTES)

    def slots(self, turn: int) -> list[int]:
        """Return the addresses of all ranks' slots number `turn`, 0 or 1."""
        assert self._slots is not None
        return [pointer + turn * SLOT_BYTES for pointer in self._slots.pointers]

    def find(self, x: DeviceArray | None) -> DeviceLocation | None:
        """Return the location of an array, or None if `x` is None or in private memory.

        Once there is symmetric memory, any empty array counts as symmetric.
        """
        if x is None or self.flags is None:
            return None
        if not x.size:  # an empty array has no address of its own, and is never accessed
            return DeviceLocation(self.flags, 0)
        for allocation in self._allocations:
            offset = x.pointer - allocation.pointers[self.rank]
            if offset >= 0 and offset + x.nbytes <= allocation.nbytes:
                return DeviceLocation(allocation, offset)
        return None

    def key(self, x: DeviceArray) -> str:
        """Return the location of `x`, as ranks compare it; InvalidArgument if it is private."""
        location = self.find(x)
        if location is None:
            raise InvalidArgument(
                f"rank {self.rank}: free(x): x was not allocated by empty(device=...) of this "
                "communicator, or was freed"
            )
        return location.key

    def free(self, x: DeviceArray) -> None:
        """Release the allocation of `x` on all ranks; collective.

        No rank may use the allocation's arrays any more.
        """
        location = self.find(x)
        assert location is not None
        if location.allocation in self._allocations:  # that of an empty array is unknown, and stays
            self._allocations.remove(location.allocation)
            self._close([location.allocation])

    def barrier(self, awaits: Iterable[int], stream: int) -> None:
        """Queue this rank's arrival, which all others see, and the wait for those of `awaits`."""
        self._count = count = (self._count + 1) % _COUNT_LIMIT
        assert self.flags is not None
        for peer, pointer in enumerate(self.flags.pointers):
            if peer != self.rank:
                self.device.write_word(pointer + self.rank * _WORD, count, stream)
        for peer in awaits:
            where = self.flags.pointers[self.rank] + peer * _WORD
            self.device.wait_word(where, count, stream)

    def close(self) -> None:
        """Release all allocations; collective."""
        allocations = self._take_all()
        if allocations:
            self._close(allocations)

    def let_go(self) -> None:
        """Let this rank's streams go on that wait for a lost rank; what they combine is of no use.

        Those that wait for this rank do so as well, on ranks that wait for the lost one.
        """
        if self.flags is None:
            return
        stream = self.device.new_stream()
        passed = (self._count + _COUNT_LIMIT // 4) % _COUNT_LIMIT
        for peer in set(range(self.size)) - {self.rank}:
            where = self.flags.pointers[self.rank] + peer * _WORD
            self.device.write_word(where, passed, stream)
        self.device.release_stream(stream)

    def leave(self) -> list[DevicePart]:
        """Leave all allocations after a loss and :meth:`let_go`, without communication.

        Returns this rank's parts: `left` may be set once all ranks have come so far.
        """
        allocations = self._take_all()
        if allocations:
            self.device.finish()
            self._close_others(allocations)
        return [allocation.part for allocation in allocations]

    def _take_all(self) -> list[DeviceAllocation]:
        shared = [one for one in (self._slots, self.flags) if one is not None]
        allocations, self._allocations = [*self._allocations, *shared], []
        self._slots = self.flags = None
        return allocations

    def _make_flags(self) -> None:
        if self.flags is None:
            self.flags = self._allocate(FLAGS)

    def _close(self, allocations: list[DeviceAllocation]) -> None:
        """Close the other ranks' parts of allocations, then release this rank's; collective."""
        self.device.finish()
        self._everyone(None)  # no rank's queued work uses the memory any more
        self._close_others(allocations)
        self._everyone(None)  # no rank has it open any more
        for allocation in allocations:
            allocation.part.release()

    def _close_others(self, allocations: list[DeviceAllocation]) -> None:
        for allocation in allocations:
            for rank, pointer in enumerate(allocation.pointers):
                if rank != self.rank:
                    self.device.close_shared(pointer)

    def _allocate(self, nbytes: int) -> DeviceAllocation:
        """Allocate a part on every rank, and open all parts in each process; collective.

        If one rank cannot, all ranks raise Unsupported and release their parts.
        """
        length = max(1, -(-nbytes // GRAIN)) * GRAIN
        own, problem = None, ""
        try:
            own = self.device.new_shared(length)
        except (Unsupported, MemoryError, OSError) as error:
            problem = str(error)
        pointers: dict[int, int] = {}
        try:
            handles = self._agree(None if own is None else own[1], problem)
            assert own is not None
            pointers[self.rank] = own[0]
            try:
                for rank in set(range(self.size)) - {self.rank}:
                    pointers[rank] = self.device.open_shared(handles[rank], length)
            except (Unsupported, OSError) as error:
                problem = str(error)
            self._agree(None, problem)
        except Unsupported:
            self._release_failed(own, pointers)
            raise
        self._last_number += 1
        everywhere = tuple(pointers[rank] for rank in range(self.size))
        part = DevicePart(self.device, own[0])
        return DeviceAllocation(self._last_number, length, everywhere, part)

    def _release_failed(self, own: tuple[int, bytes] | None, pointers: dict[int, int]) -> None:
        """Close and release the memory of an allocation that failed on some rank; collective.

        `own` is the address and the handle of this rank's part, None if it was not allocated.
        `pointers` are those that this process has opened, by rank.
        """
        for rank, pointer in pointers.items():
            if rank != self.rank:
                self.device.close_shared(pointer)
        self._everyone(None)  # no rank has it open any more
        if own is not None:
            self.device.release_shared(own[0])

    def _agree(self, value: Any, problem: str) -> list[Any]:
        entries = self._everyone((value, problem))
        problems = [f"on rank {rank}: {text}" for rank, (_, text) in enumerate(entries) if text]
        if problems:
            where = f"rank {self.rank}: symmetric memory on {self.device.describe()}"
            raise Unsupported(f"{where}: {'; '.join(problems)}")
        return [entry for entry, _ in entries]
