"""Symmetric memory on GPUs of one node: every rank can reach the arrays of all, by CUDA IPC.

Memory is allocated by itself, not from a pool, for a handle stands for a whole allocation.  It is
given back by all ranks together, in ``comm.free(x)`` or with the communicator: a rank that gave its
memory back while others have it open would take it from under them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.array import DeviceArray
from ..device.base import Device
from ..errors import InvalidArgument, Unsupported

GRAIN = 2 << 20  # bytes; what the driver allocates at the least
FLAGS = 1 << 12  # bytes of words by which the ranks meet, in an allocation of their own


@dataclass(frozen=True)
class Block:
    """One allocation, on every rank.

    Attributes
    ----------
    number : int
        The same on every rank.
    nbytes : int
        Of each rank's part.
    pointers : tuple of int
        Where each rank's part is, in this process.
    """

    number: int
    nbytes: int
    pointers: tuple[int, ...]


@dataclass(frozen=True)
class Spot:
    """Where an array lies in a block, the same on every rank."""

    block: Block
    offset: int

    def pointers(self) -> list[int]:
        """Give the address of every rank's array."""
        return [pointer + self.offset for pointer in self.block.pointers]

    @property
    def key(self) -> str:
        """Name the spot, for the ranks to see that they mean the same one."""
        return f"@{self.block.number}+{self.offset}"


class Arena:
    """The symmetric device memory of one communicator.

    Parameters
    ----------
    device : Device
        Of this rank.
    rank, size : int
        Of the communicator.
    everyone : callable
        ``everyone(value)`` gives the values of all ranks; collective.
    """

    def __init__(self, device: Device, rank: int, size: int, everyone: Callable[[Any], list[Any]]):
        self.device, self.rank, self.size, self._everyone = device, rank, size, everyone
        self._blocks: list[Block] = []
        self._made = 0
        self.flags: Block | None = None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Make an array on every rank, filled with zeros; collective, all want the same."""
        if self.flags is None:
            self.flags = self._allocate(FLAGS)
        block = self._allocate(math.prod(shape) * dtype.itemsize)
        self._blocks.append(block)
        return self.device.wrap(block.pointers[self.rank], shape, dtype)

    def find(self, x: DeviceArray | None) -> Spot | None:
        """Give the spot of an array, or None if it is private memory."""
        if x is None or self.flags is None:
            return None
        if not x.size:
            return Spot(self.flags, 0)  # it has no address of its own, and nobody looks there
        for block in self._blocks:
            offset = x.pointer - block.pointers[self.rank]
            if offset >= 0 and offset + x.nbytes <= block.nbytes:
                return Spot(block, offset)
        return None

    def key(self, x: DeviceArray) -> str:
        """Name an array's allocation; raise if it is private memory."""
        spot = self.find(x)
        if spot is None:
            raise InvalidArgument(
                f"rank {self.rank}: free(x): x is not from empty(device=...) of this communicator, "
                "or is free already"
            )
        return spot.key

    def free(self, x: DeviceArray) -> None:
        """Give an allocation back; collective.  Nobody may use its arrays any more."""
        spot = self.find(x)
        assert spot is not None
        if spot.block in self._blocks:  # an empty array cannot tell its block, which stays
            self._blocks.remove(spot.block)
            self._close([spot.block])

    def close(self) -> None:
        """Give everything back; collective."""
        blocks, self._blocks = self._blocks, []
        if self.flags is not None:
            blocks.append(self.flags)
            self.flags = None
        if blocks:
            self._close(blocks)

    def _close(self, blocks: list[Block]) -> None:
        """Close what is the others', and when all have done so release what is ours."""
        self.device.finish()
        self._everyone(None)
        for block in blocks:
            for rank, pointer in enumerate(block.pointers):
                if rank != self.rank:
                    self.device.close_shared(pointer)
        self._everyone(None)
        for block in blocks:
            self.device.release_shared(block.pointers[self.rank])

    def _allocate(self, nbytes: int) -> Block:
        """Make memory on every rank, open that of all; if one cannot, all raise and keep none."""
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
            self._undo(own, pointers)
            raise
        self._made += 1
        return Block(self._made, length, tuple(pointers[rank] for rank in range(self.size)))

    def _undo(self, own: tuple[int, bytes] | None, pointers: dict[int, int]) -> None:
        """Give back what was made in vain; collective."""
        for rank, pointer in pointers.items():
            if rank != self.rank:
                self.device.close_shared(pointer)
        self._everyone(None)
        if own is not None:
            self.device.release_shared(own[0])

    def _agree(self, value: Any, problem: str) -> list[Any]:
        told = self._everyone((value, problem))
        wrong = [f"on rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]
        if wrong:
            where = f"rank {self.rank}: symmetric memory on {self.device.describe()}"
            raise Unsupported(f"{where}: {'; '.join(wrong)}")
        return [entry for entry, _ in told]
