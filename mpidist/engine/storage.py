"""The location of each block of a schedule: the user's input or result, or scratch memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from ..backends.program import Action, store
from ..calls.arrays import address, view_at
from ..errors import ScheduleError
from ..operations import Op, divide_half, is_half
from ..schedule.contract import Contract
from ..schedule.rounds import Copy, Recv, Reduce, Step, block_tuple
from ..schedule.unrolled import Lengths, Strands, Written

Piece = tuple[Any, int, int]  # elements start … stop of a flat array


class Memory(Protocol):
    """The operations of a program's memory that differ between the host and a GPU.

    Arrays are flat and contiguous.  An action does its work at once, or queues it on a stream: in
    both cases actions take effect in the order in which they are called.
    """

    dtype: np.dtype

    def array(self, data: Any) -> Any:
        """Return the array that a program holds in place of a call's array, for example a view."""

    def allocate(self, count: int) -> Any:
        """Return scratch memory of `count` elements; it lives as long as a program refers to it."""

    def view(self, piece: Piece) -> Any:
        """Return the elements of a Piece (array, start, stop) as an array."""

    def address(self, piece: Piece) -> int:
        """Return the address of a Piece (array, start, stop), which must not be empty."""

    def store(self, target: Any, source: Any) -> Action:
        """Return the action that copies `source` to `target`, which has its length."""

    def combine(self, op: Op, left: Any, right: Any, target: Any) -> Action:
        """Return the action that stores op(left, right) in `target`, which may be an operand."""

    def divide(self, source: Any, target: Any, divisor: int) -> Action:
        """Return the action that stores source / divisor in `target`, which may be `source`."""


class HostMemory(Memory):
    """Memory of numpy arrays."""

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype

    def array(self, data: np.ndarray) -> np.ndarray:
        """Return a view that does not keep its owner alive: the program cache tracks the owner."""
        return view_at(address(data), data.size, data.dtype)

    def allocate(self, count: int) -> np.ndarray:
        return np.empty(count, self.dtype)

    @staticmethod
    def view(piece: Piece) -> np.ndarray:
        return piece[0][piece[1] : piece[2]]

    def address(self, piece: Piece) -> int:
        return piece[0].__array_interface__["data"][0] + piece[1] * self.dtype.itemsize

    store = staticmethod(store)

    @staticmethod
    def combine(op: Op, left: np.ndarray, right: np.ndarray, target: np.ndarray) -> Action:
        return partial(op.function if op.builtin else op.combine, left, right, out=target)

    @staticmethod
    def divide(source: np.ndarray, target: np.ndarray, divisor: int) -> Action:
        if is_half(source.dtype):
            return partial(divide_half, source, divisor, target)
        return partial(np.true_divide, source, np.asarray(divisor, source.dtype), target)


class Storage:
    """The location of each block: the user's input, the user's result, or scratch memory.

    `place` is (rank, size, root); `lengths` has the elements of each block; `x` and `out` are None
    where this rank has no input or result.
    """

    def __init__(
        self,
        contract: Contract,
        place: tuple[int, int, int],
        lengths: Lengths,
        x: Any,
        out: Any,
        memory: Memory,
    ):
        rank, size, root = place
        self.memory, self.lengths, self.scratch_elements = memory, lengths, 0
        count = len(lengths.outgoing)
        self.where: dict[tuple[str, int], Piece] = {}
        self.results = contract.output_blocks(rank, size, root, count)
        self._homes: dict[tuple[str, int], Piece] = {}
        inputs = contract.input_blocks(rank, size, root, count)
        input_lengths = lengths.incoming if contract.input_buffer == "in" else lengths.outgoing
        if x is not None:
            self._lay(self.where, contract.input_buffer, inputs, input_lengths, x)
        if out is not None:
            self._lay(self._homes, "out", self.results, lengths.outgoing, out)

    def place(self, buffer: str, numbers: range, lengths: Sequence[int], array: Any) -> None:
        """Let the blocks `numbers` of a buffer that have no place yet be in `array`, in order."""
        table: dict[tuple[str, int], Piece] = {}
        self._lay(table, buffer, numbers, lengths, array)
        self._homes = {**table, **self._homes}

    @staticmethod
    def _lay(table: dict, buffer: str, numbers: range, lengths: Sequence[int], array: Any) -> None:
        at = 0
        for block in numbers:
            table[buffer, block] = (array, at, at + lengths[block])
            at += lengths[block]

    def prepare(self, written: Written) -> None:
        """Allocate scratch memory for the blocks that a schedule writes outside of the result.

        `written` has the rounds of the schedule as lists.  Neighbouring blocks become neighbours in
        memory, so that a range of blocks is one message.
        """
        self.allocate(_writes(written))

    def allocate(self, written: Iterable[tuple[str, int]]) -> None:
        """Allocate scratch memory for those of some blocks that have no place yet."""
        places = sorted(place for place in written if place not in self._homes)
        sizes = [self._length(place) for place in places]
        scratch = self.memory.allocate(sum(sizes))
        self.scratch_elements += scratch.size
        for place, stop, length in zip(places, accumulate(sizes), sizes):
            self._homes[place] = (scratch, stop - length, stop)

    def _length(self, place: tuple[str, int]) -> int:
        buffer, block = place
        lengths = self.lengths.outgoing  # tmp is cut like out, as the prover has it
        if buffer == "tmp" and block >= len(lengths):
            block %= len(lengths)  # only if all have one length, else the prover refuses it
        if buffer == "in" or not 0 <= block < len(lengths):
            raise ScheduleError(f"{buffer!r} has no block {block} to write", block=block)
        return lengths[block]

    def read(self, place: tuple[str, int]) -> Piece:
        """Return the Piece (array, start, stop) that now holds a block (buffer, number)."""
        piece = self.where.get(place)
        if piece is None:
            raise ScheduleError(
                f"the block of {place[0]!r} is read before anything was stored there",
                block=place[1],
            )
        return piece

    def write(self, place: tuple[str, int]) -> Piece:
        """Return the Piece (array, start, stop) to write a block to; later reads find it there."""
        piece = self.where[place] = self._homes[place]
        return piece

    def finish(self) -> list[Action]:
        """Return the actions that copy result blocks to the result from where they are now.

        A block that was never received is still in the input, for example.
        """
        memory = self.memory
        actions: list[Action] = []
        pairs = []
        for block in self.results:
            home, now = self._homes.get(("out", block)), self.where.get(("out", block))
            if home is None:
                continue
            if now is None:
                raise ScheduleError("the result is never written", block=block)
            if home is now or home[1] == home[2]:
                continue
            if memory.address(home) != memory.address(now):  # else in place, by another array
                pairs.append((home, now))
        for home, now in merge_rows(pairs):
            actions.append(memory.store(memory.view(home), memory.view(now)))
        return actions


def _writes(written: Written) -> set[tuple[str, int]]:
    places: set[tuple[str, int]] = set()
    for item in written:
        if isinstance(item, Strands):
            places.update(*(_writes(s) for s in item.strands))
        else:
            places.update(writes(item))
    return places


def writes(steps: Iterable[Step]) -> Iterator[tuple[str, int]]:
    """Yield the blocks (buffer, number) that the messages and copies of a round write."""
    for step in steps:
        if isinstance(step, (Recv, Reduce)):
            yield from [(step.buffer, b) for b in block_tuple(step.blocks)]
        elif isinstance(step, Copy):
            yield from [(step.target, b) for b in block_tuple(step.target_blocks)]


def merge(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces (array, start, stop) that are adjacent in memory; leave out empty ones."""
    merged: list[Piece] = []
    for array, start, stop in pieces:
        if start == stop:
            continue
        if merged and merged[-1][0] is array and merged[-1][2] == start:
            merged[-1] = (array, merged[-1][1], stop)
        else:
            merged.append((array, start, stop))
    return merged


def merge_rows(pairs: Sequence[tuple[Piece, ...]]) -> list[tuple[Piece, ...]]:
    """Join rows of pieces (array, start, stop) that are adjacent in memory in every column.

    A row has the pieces of one action, such as target and source.  Rows of empty pieces are left
    out.
    """
    merged: list[tuple[Piece, ...]] = []
    for row in pairs:
        if row[0][1] == row[0][2]:
            continue
        last = merged[-1] if merged else None
        if last and all(a[0] is b[0] and a[2] == b[1] for a, b in zip(last, row)):
            merged[-1] = tuple((a[0], a[1], b[2]) for a, b in zip(last, row))
        else:
            merged.append(tuple(row))
    return merged


@dataclass(slots=True)
class MessageScratch:
    """Scratch memory for the messages of one strand (a list of rounds); each round reuses it.

    `buffers` are its arrays, `taken` of them in use in this round; `elements` counts all that were
    allocated.  Strands inside it that run concurrently have their own scratch memory, in `inner`.
    """

    memory: Memory
    buffers: list[Any] = field(default_factory=list)
    taken: int = 0
    elements: int = 0
    inner: dict[int, MessageScratch] = field(default_factory=dict)

    def take(self, n: int) -> Piece:
        """Return memory for `n` elements that no other message of this round uses."""
        index, self.taken = self.taken, self.taken + 1
        if index == len(self.buffers):
            self.buffers.append(self.memory.allocate(0))
        if self.buffers[index].size < n:
            # A little more than asked for: blocks of one array differ in length by one element.
            self.buffers[index] = self.memory.allocate(n + 1)
            self.elements += n + 1
        return self.buffers[index], 0, n

    def within(self, k: int) -> MessageScratch:
        """Return the scratch memory number `k`, for inner strands that run one after the other."""
        return self.inner.setdefault(k, MessageScratch(self.memory))

    def total(self) -> int:
        """Return the number of scratch elements held, including those in `inner`."""
        return self.elements + sum(a.total() for a in self.inner.values())
