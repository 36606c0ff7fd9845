"""Symmetric memory on GPUs of one node: every rank can access the arrays of all, by CUDA IPC.

Each array has an allocation of its own, not from a pool, because a handle stands for a whole
allocation.  All ranks release it together, in ``comm.free(x)`` or with the communicator: other
ranks must not have memory open when its owner releases it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ..backends.program import Program, library_call
from ..calls.call import Call
from ..device.array import DeviceArray
from ..device.base import Device
from ..errors import InvalidArgument, Unsupported
from ..operations import is_mean
from ..schedule.registry import Choice
from ..schedule.rounds import blocks
from .executor import GpuExecutor

GRAIN = 2 << 20  # bytes; the driver's smallest allocation
FLAGS = 1 << 12  # bytes of the barrier's words, in an allocation of their own


@dataclass(frozen=True)
class Block:
    """One allocation, on every rank.

    Attributes
    ----------
    number : int
        Number of the allocation, the same on every rank.
    nbytes : int
        Bytes of each rank's part.
    pointers : tuple of int
        Address of each rank's part, in this process.
    """

    number: int
    nbytes: int
    pointers: tuple[int, ...]


@dataclass(frozen=True)
class Spot:
    """The location of an array in a block, the same on every rank."""

    block: Block
    offset: int

    def pointers(self) -> list[int]:
        """Return the address of every rank's array."""
        return [pointer + self.offset for pointer in self.block.pointers]

    @property
    def key(self) -> str:
        """Name of the spot, which the ranks compare."""
        return f"@{self.block.number}+{self.offset}"


class Arena:
    """The symmetric device memory of one communicator.

    Parameters
    ----------
    device : Device
        Device of this rank.
    rank, size : int
        Rank and size in the communicator.
    everyone : callable
        ``everyone(value)`` returns the values of all ranks; collective.
    """

    def __init__(self, device: Device, rank: int, size: int, everyone: Callable[[Any], list[Any]]):
        self.device, self.rank, self.size, self._everyone = device, rank, size, everyone
        self._blocks: list[Block] = []
        self._made = 0
        self.flags: Block | None = None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Allocate an array on every rank, filled with zeros; collective, the same on all."""
        if self.flags is None:
            self.flags = self._allocate(FLAGS)
        block = self._allocate(math.prod(shape) * dtype.itemsize)
        self._blocks.append(block)
        return self.device.wrap(block.pointers[self.rank], shape, dtype)

    def find(self, x: DeviceArray | None) -> Spot | None:
        """Return the spot of an array, or None if it is private memory."""
        if x is None or self.flags is None:
            return None
        if not x.size:
            return Spot(self.flags, 0)  # it has no address of its own, and is never accessed
        for block in self._blocks:
            offset = x.pointer - block.pointers[self.rank]
            if offset >= 0 and offset + x.nbytes <= block.nbytes:
                return Spot(block, offset)
        return None

    def key(self, x: DeviceArray) -> str:
        """Return the name of an array's allocation; raise if it is private memory."""
        spot = self.find(x)
        if spot is None:
            raise InvalidArgument(
                f"rank {self.rank}: free(x): x is not from empty(device=...) of this communicator, "
                "or is free already"
            )
        return spot.key

    def free(self, x: DeviceArray) -> None:
        """Release an allocation; collective.  No rank may use its arrays any more."""
        spot = self.find(x)
        assert spot is not None
        if spot.block in self._blocks:  # the block of an empty array is unknown, and stays
            self._blocks.remove(spot.block)
            self._close([spot.block])

    def close(self) -> None:
        """Release all allocations; collective."""
        blocks, self._blocks = self._blocks, []
        if self.flags is not None:
            blocks.append(self.flags)
            self.flags = None
        if blocks:
            self._close(blocks)

    def _close(self, blocks: list[Block]) -> None:
        """Close the other ranks' memory; when all have done so, release this rank's."""
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
        """Allocate on every rank and open that of all; if one cannot, all raise and keep none."""
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
        """Release the memory of a failed allocation; collective."""
        for rank, pointer in pointers.items():
            if rank != self.rank:
                self.device.close_shared(pointer)
        self._everyone(None)
        if own is not None:
            self.device.release_shared(own[0])

    def _agree(self, value: Any, problem: str) -> list[Any]:
        entries = self._everyone((value, problem))
        wrong = [f"on rank {rank}: {text}" for rank, (_, text) in enumerate(entries) if text]
        if wrong:
            where = f"rank {self.rank}: symmetric memory on {self.device.describe()}"
            raise Unsupported(f"{where}: {'; '.join(wrong)}")
        return [entry for entry, _ in entries]


NEEDS = {"allreduce": "out", "broadcast": "out", "allgather": "out", "reduce_scatter": "x"}
"""The array of each call that must be symmetric, on every rank."""
_WORD = 4  # bytes
_AROUND = 1 << 32


def why_not(call: Call, arena: Arena | None) -> str | None:
    """Return why a call cannot be served here, or None."""
    need = NEEDS.get(call.collective)
    if need is None:
        return f"{call.collective} has no form in symmetric memory of GPUs"
    if arena is None or spot_of(call, arena) is None:
        return f"{need} is no array of comm.empty(device=...)"
    if call.op is not None and not call.op.builtin:
        return "a function of Python does not run on a device"
    if call.op is not None and not arena.device.combines(call.dtype):
        return f"the device has no arithmetic for {call.dtype}"
    return None


def spot_of(call: Call, arena: Arena) -> Spot | None:
    """Return the spot of the array that must be symmetric."""
    return arena.find(call.out if NEEDS[call.collective] == "out" else call.x)


class Push(GpuExecutor):
    """The kernels of one communicator."""

    name = "ipc"

    def __init__(self, arena: Arena):
        self._arena, self._device = arena, arena.device
        self._count = 0
        self._last: int | None = None
        self._mark = self._device.event()

    def takes(self, call: Call, algorithm: str, background: bool) -> bool:
        """Return whether a kernel exists; in the background the ranks would have to meet first."""
        return algorithm == "auto" and call.collective in NEEDS and not background

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return why the call cannot be served, most often because the array is private memory."""
        return why_not(call, self._arena)

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the location of the array."""
        spot = spot_of(call, self._arena)
        assert spot is not None
        return f"in symmetric memory of GPUs {spot.key}"

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Return the program that queues the call."""
        return library_call(partial(self.serve, call))

    def serve(self, call: Call) -> None:
        """Queue a call, after all ranks have reached it."""
        spot = spot_of(call, self._arena)
        assert spot is not None
        data = [a for a in (call.out, call.x) if isinstance(a, DeviceArray)]
        stream = data[0].stream
        for other in {a.stream for a in data[1:]} | {self._last} - {None, stream}:
            assert other is not None
            self._mark.record(other)  # barriers of one communicator follow each other
            self._mark.block(stream)
        getattr(self, f"_{call.collective}")(call, spot, stream)
        for other in {a.stream for a in data[1:]} - {stream}:
            self._mark.record(stream)
            self._mark.block(other)
        self._last = stream

    def _barrier(self, stream: int) -> None:
        """Queue a barrier of the streams of all ranks."""
        self._count = count = (self._count + 1) % _AROUND
        flags, rank = self._arena.flags, self._arena.rank
        assert flags is not None
        for peer, pointer in enumerate(flags.pointers):
            if peer != rank:
                self._device.write_word(pointer + rank * _WORD, count, stream)
        for peer in range(self._arena.size):
            if peer != rank:
                self._device.wait_word(flags.pointers[rank] + peer * _WORD, count, stream)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes and target != source:
            self._device.copy(target, source, nbytes, stream)

    def _fold(
        self, call: Call, sources: list[int], targets: list[int], count: int, stream: int
    ) -> None:
        if count:
            assert call.op is not None
            divisor = call.size if is_mean(call.op) else 1
            self._device.combine(call.op.name, call.dtype, sources, targets, count, divisor, stream)

    def _allreduce(self, call: Call, spot: Spot, stream: int) -> None:
        outs, item = spot.pointers(), call.dtype.itemsize
        self._copy(outs[call.rank], call.x.pointer, call.x.nbytes, stream)
        mine = blocks(call.count, call.size)[call.rank]
        parts = [pointer + mine.start * item for pointer in outs]
        self._barrier(stream)
        self._fold(call, parts, parts, mine.stop - mine.start, stream)
        self._barrier(stream)

    def _reduce_scatter(self, call: Call, spot: Spot, stream: int) -> None:
        start, item = sum(call.counts[: call.rank]), call.dtype.itemsize
        parts = [pointer + start * item for pointer in spot.pointers()]
        self._barrier(stream)
        self._fold(call, parts, [call.out.pointer], call.counts[call.rank], stream)
        self._barrier(stream)

    def _allgather(self, call: Call, spot: Spot, stream: int) -> None:
        start = ([0, *accumulate(call.counts)][call.rank]) * call.dtype.itemsize
        self._barrier(stream)
        for pointer in spot.pointers():
            self._copy(pointer + start, call.x.pointer, call.x.nbytes, stream)
        self._barrier(stream)

    def _broadcast(self, call: Call, spot: Spot, stream: int) -> None:
        self._barrier(stream)
        if call.rank == call.root:
            for pointer in spot.pointers():
                self._copy(pointer, call.x.pointer, call.x.nbytes, stream)
        self._barrier(stream)
