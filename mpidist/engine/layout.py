"""The layout of a schedule in shared memory: which elements of which array each step touches.

A :class:`Plan` is a schedule of one rank as phases, with the memory that it needs for any length; a
:class:`Layout` is a plan with the lengths of its blocks.  Neither has addresses: a layout is bound
to the arrays of many calls (:mod:`.mapped`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from ..calls.call import Call
from ..errors import ScheduleError
from ..schedule.phases import REST, Cell, Row, phases_of
from ..schedule.registry import Algorithm
from ..schedule.unrolled import Lengths
from ..shared_memory.heap import Heap, Location
from .storage import Piece, Storage, merge_rows

_KEPT = 1024  # layouts of a plan
ARGUMENT = {"in": "x", "out": "out"}
"""The argument of a call that is in each buffer."""
Key = tuple[int, str]  # a rank and its buffer


class Plan:
    """A schedule of this rank as phases, and the memory that it needs for any length.

    Attributes
    ----------
    phases : Phases
        What this rank copies and combines between the meetings.
    shared : list of str
        Buffers that others reach at the same location on every rank.
    noted : list of str
        Buffers that others reach where the rank's notes say.
    scratch : list of str
        Scratch buffers that others reach, in the shadow of an array.
    may_copy : bool
        Whether a private input may be copied to the result, and be read there.
    """

    def __init__(self, call: Call, algorithm: Algorithm, arity: int):
        rank, size, root = self._place = call.rank, call.size, call.root
        self.contract = contract = algorithm.contract
        count = algorithm.block_count(size)
        self.ranges = {
            "in": [contract.input_blocks(peer, size, root, count) for peer in range(size)],
            "out": [contract.output_blocks(peer, size, root, count) for peer in range(size)],
        }
        results = self.ranges["out"].__getitem__
        self.phases = phases = phases_of(
            lambda peer: algorithm.schedule(peer, size, root, arity), rank, size, count, results
        )
        reached = {buffer for _, buffer in phases.reached}
        buffers: tuple[str, ...] = ("out", "in")
        whole = [b for b in buffers if all(len(found) == count for found in self.ranges[b])]
        apart = [
            buffer
            for buffer in buffers[::-1]
            if not all(self.ranges[buffer]) or (contract.rooted and buffer not in whole)
        ]
        self.noted: list[str] = [buffer for buffer in apart if buffer in reached]
        self.shared: list[str] = [b for b in buffers[::-1] if b in reached - set(apart)]
        self.scratch = sorted(reached & {"tmp", REST})
        self.may_copy = contract.same_length and "in" in self.shared and "out" in whole
        self.needs_lines = len(phases.awaits) > 1 or bool(self.noted)
        self._whole: list[str] = whole
        self._layouts: dict[Hashable, Layout] = {}

    def locations(self, call: Call, heap: Heap, background: bool = False) -> dict[str, Location]:
        """Return the locations of the shared and the scratch buffers, where they have one."""
        data = {"in": call.x, "out": call.out}
        found: dict[str, Location] = {}
        for buffer in self.shared:
            location = heap.find(data[buffer])
            if location is not None:
                found[buffer] = location
        if self.may_copy and "in" not in found:
            location = found.get("out") or heap.find(call.out)
            if location is not None:
                found["in"] = found["out"] = location  # one object, only here: x is to be copied
        if self.scratch:
            # Operations in the background may read one input at once, but share no shadow.
            beside = [b for b in self._whole if b == "out" or not background]
            free = [location for b in beside if (location := heap.find(data[b])) is not None]
            for buffer, location in zip(self.scratch, dict.fromkeys(free)):
                found[buffer] = location
        return found

    def why_not(self, call: Call, heap: Heap, background: bool) -> str | None:
        """Return why the arrays of a call are not in the memory that others reach."""
        found = self.locations(call, heap, background)
        for buffer in self.shared:
            if buffer not in found:
                wanted = "out" if buffer == "in" and self.may_copy else buffer
                return f"{ARGUMENT[wanted]} was not allocated by comm.empty()"
        for buffer in self.noted:
            data = call.x if buffer == "in" else call.out
            mine = (call.rank, buffer) in self.phases.reached and data is not None and data.size
            if mine and heap.find(data) is None:
                return f"{ARGUMENT[buffer]} was not allocated by comm.empty()"
        for buffer in self.scratch:
            if buffer not in found:
                beside = [ARGUMENT[b] for b in self._whole if b == "out" or not background]
                return (
                    f"others reach its scratch memory {buffer!r}, which is beside an array of "
                    f"comm.empty(): expected one as {' or '.join(beside) or 'a whole array'}"
                )
        return None

    def layout(self, call: Call) -> Layout:
        """Return the layout of the schedule for the lengths of a call."""
        key = (call.counts, call.out_counts) if call.counts else call.count
        found = self._layouts.get(key)
        if found is None:
            if call.counts:
                each = self.phases.count // call.size
                lengths = Lengths.per_rank(call.counts, call.out_counts, each, 1)
            else:
                lengths = Lengths.even(call.count, self.phases.count, 1)
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            found = self._layouts[key] = Layout(self, self._place, lengths)
        return found


class _Symbols:
    """Memory without addresses: an array is what stands for it, its elements are a Piece."""

    def __init__(self) -> None:
        self.scratch: list[_Scratch] = []

    def allocate(self, count: int) -> _Scratch:
        """Return what stands for scratch memory of `count` elements."""
        self.scratch.append(_Scratch(count))
        return self.scratch[-1]

    def view(self, piece: Piece) -> Piece:
        """Return the piece."""
        return piece

    def address(self, piece: Piece) -> tuple[int, int]:
        """Return what differs for different pieces."""
        return id(piece[0]), piece[1]

    def store(self, target: Piece, source: Piece) -> tuple[Piece, Piece]:
        """Return the two pieces of a copy."""
        return target, source


class _Scratch:
    """Stands for scratch memory of `size` elements."""

    def __init__(self, size: int):
        self.size = size


class Step(NamedTuple):
    """Pieces of memory to copy or combine, and those where the result is stored."""

    ranks: tuple[int, ...]
    sources: tuple[Piece, ...]
    targets: tuple[Piece, ...]


class Layout:
    """A schedule with lengths: each step has pieces of arrays, which are not bound to memory yet.

    Attributes
    ----------
    steps : list of list of Step
        The steps of each phase; neighbouring blocks are one step.
    finish : list of (Piece, Piece)
        Copies (target, source) in the end, of blocks of the result that are still elsewhere.
    lengths : dict
        Number of elements of each array, by what stands for it in pieces.
    scratch : list of _Scratch
        What stands for this rank's scratch memory.
    """

    def __init__(self, plan: Plan, place: tuple[int, int, int], lengths: Lengths):
        self._plan, self._lengths, self._rank = plan, lengths, place[0]
        self.lengths: dict[Any, int] = {}
        self._keys: dict[Key, Key] = {}
        phases, contract, rank = plan.phases, plan.contract, place[0]
        x, out = (
            self._array(rank, buffer) if plan.ranges[buffer][rank] else None
            for buffer in ("in", "out")
        )
        symbols: Any = _Symbols()
        self._storage = storage = Storage(contract, place, lengths, x, out, symbols)
        if x is not None and contract.input_buffer == "out":
            storage.where.update({("in", b): at for (_, b), at in storage.where.items()})
        for kind in plan.scratch:
            buffer = "out" if kind == REST else kind
            array = self._array(rank, kind)
            storage.place(buffer, range(phases.count), lengths.outgoing, array)
        targets = (cell for rows in phases.rows for row in rows for cell in row.targets)
        storage.allocate((buffer, block) for owner, buffer, block in targets if owner == rank)
        self.steps: list[list[Step]] = []
        for rows, stored in zip(phases.rows, phases.stored):
            self.steps.append(self.steps_of(rows))
            for written in sorted(stored):  # by others: to be read there from now on
                storage.write(written)
        self.finish: list[Any] = storage.finish()
        self.scratch: list[_Scratch] = [made for made in symbols.scratch if made.size]

    def _array(self, owner: int, kind: str) -> Key:
        """Return what stands for the array with a buffer of a rank: always the same object."""
        key = (owner, kind)
        if key not in self._keys:
            self._keys[key] = key
            numbers = self._blocks(owner, kind)
            self.lengths[key] = sum(self._lengths_of(kind)[numbers.start : numbers.stop])
        return self._keys[key]

    def _blocks(self, owner: int, kind: str) -> range:
        ranges = self._plan.ranges.get(kind)
        return range(self._plan.phases.count) if ranges is None else ranges[owner]

    def _lengths_of(self, kind: str) -> Sequence[int]:
        apart = kind == "in" and self._plan.contract.input_buffer == "in"
        return self._lengths.incoming if apart else self._lengths.outgoing

    def steps_of(self, rows: Sequence[Row]) -> list[Step]:
        """Return the steps of rows; those of neighbouring blocks that are apart become one."""
        found: list[tuple[tuple[Any, ...], tuple[Piece, ...]]] = []
        part = 0
        written: set[Piece] = set()
        for row in rows:
            sources = [self._place(cell, self._storage.read) for cell in row.sources]
            targets = [self._place(cell, self._storage.write) for cell in row.targets]
            pieces = (*sources, *targets)
            if len({stop - start for _, start, stop in pieces}) > 1:
                block = row.sources[0][2]
                raise ScheduleError("is stored in a block of another length", block=block)
            if not written.isdisjoint(pieces):
                part, written = part + 1, set()
            written.update(targets)
            found.append(((row.ranks, len(sources), len(targets), part), pieces))
        steps = []
        for (ranks, count, *_), group in groupby(found, itemgetter(0)):
            for merged in merge_rows([pieces for _, pieces in group]):
                steps.append(Step(ranks, merged[:count], merged[count:]))
        return steps

    def _place(self, cell: Cell, own: Callable[[tuple[str, int]], Piece]) -> Piece:
        """Return where a block is; ``own(place)`` returns it for those of this rank."""
        owner, buffer, block = cell
        if owner == self._rank:
            return own((buffer, block))
        kind = buffer
        if buffer == "out" and block not in self._blocks(owner, buffer):
            kind = REST
        numbers, lengths = self._blocks(owner, kind), self._lengths_of(kind)
        if block not in numbers:
            raise ScheduleError(f"is not in {buffer!r} of rank {owner}", block=block)
        start = sum(lengths[numbers.start : block])
        return self._array(owner, kind), start, start + lengths[block]
