"""The layout of a schedule in shared memory: which elements of which array each step touches.

A :class:`Plan` is a schedule of one rank as phases, with the memory that it needs for any length; a
:class:`Layout` is a plan with the lengths of its blocks.  Neither has addresses: a layout is bound
to the arrays of many calls (:mod:`.mapped`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

from ..calls.call import Call
from ..errors import ScheduleError
from ..schedule.phases import REST, Cell, Messages, Row, phases_of
from ..schedule.registry import GENERATION, Choice, Groups
from ..schedule.unrolled import Lengths
from ..selection.segmentation import Segmentation
from .binding import Placed, place
from .storage import Piece, Storage, merge_rows, writes

_KEPT = 1024  # layouts of a plan, and plans of a memory
_LINE = 64  # bytes of a cache line
ARGUMENT = {"in": "x", "out": "out"}
"""The argument of a call that is in each buffer."""
Key = tuple[int, str]  # a rank and its buffer


class Plan:
    """A schedule of this rank as phases, and the memory that it needs for any length.

    Of `call` only the collective, rank, size and root count; each block is cut into `pieces`.
    """

    def __init__(
        self,
        call: Call,
        choice: Choice,
        groups: Groups,
        arity: int,
        pipelining: Segmentation,
        pieces: int = 1,
    ):
        rank, size, root = self._place = call.rank, call.size, call.root
        algorithm, self.pieces = choice.algorithm, pieces
        self._algorithm, self._pipelining = algorithm, pipelining
        self.contract = contract = algorithm.contract
        count = algorithm.block_count(size, groups) * pieces
        self.ranges = {
            "in": [contract.input_blocks(peer, size, root, count) for peer in range(size)],
            "out": [contract.output_blocks(peer, size, root, count) for peer in range(size)],
        }
        results = self.ranges["out"].__getitem__
        known = (size, root, choice.arity or arity, groups, pieces)
        self.phases = phases = phases_of(
            algorithm.schedules(range(size), *known).__getitem__,
            rank,
            groups,
            count,
            results,
            algorithm.memory,
        )
        ranks = phases.ranks
        if contract.idempotent:  # a barrier has meetings and messages, but no data
            phases.rows = [[m for m in rows if isinstance(m, tuple)] for rows in phases.rows]
            phases.stored = [{} for _ in phases.rows]
            phases.reached, phases.held = set(), {}
        reached = {buffer for _, buffer in phases.reached}
        buffers: tuple[str, ...] = ("out", "in")
        whole = [b for b in buffers if all(len(found) == count for found in self.ranges[b])]
        # Some rank has none; or each has a part of the root's, which may begin anywhere in an
        # allocation: such a buffer is not at one location on all ranks.
        apart = [
            buffer
            for buffer in buffers[::-1]
            if not all(self.ranges[buffer]) or (contract.rooted and buffer not in whole)
        ]
        # Buffers that others reach: where the rank's notes say; at one location on every rank.
        self.noted: list[str] = [buffer for buffer in apart if buffer in reached]
        self.shared: list[str] = [b for b in buffers[::-1] if b in reached - set(apart)]
        self.scratch = sorted(reached & {"tmp", REST})
        self.slots = sorted(reached - {*buffers, "tmp", REST})  # parts of this rank's slot
        # A private input may be copied to the result, and be read there: then the result alone
        # needs to be in shared memory.
        self.may_copy = contract.same_length and "in" in self.shared and "out" in whole
        self.needs = sorted({"out" if self.may_copy else ARGUMENT[b] for b in self.shared})
        # The arrival at the call is the first meeting, on the board; others need barrier counters.
        self.needs_lines = phases.meetings > 1 or bool(self.noted) or phases.has_messages
        # Whom each meeting awaits, by their places on the node; None: all.
        self.awaits: list[tuple[int, ...] | None] = [
            None if len(peers) == len(ranks) - 1 else tuple([ranks.index(peer) for peer in peers])
            for peers in phases.awaits
        ] or [None]
        self.at = {peer: n for n, peer in enumerate(ranks)}  # place on the node of each rank
        self.mixed = phases.has_messages or len(groups) > 1  # a rank of the node sends messages too
        self.whole: list[str] = whole  # "in" and "out", if all ranks have all of their blocks
        self._layouts: dict[Hashable, Layout] = {}

    def layout(self, call: Call) -> Layout:
        """Return the layout of the schedule for the lengths of a call."""
        key = (
            (call.counts, call.out_counts, call.dtype.itemsize)
            if call.counts
            else (call.count, call.dtype.itemsize)
        )
        found = self._layouts.get(key)
        if found is None:
            count, pieces = self.phases.count // self.pieces, self.pieces
            if call.counts:
                each = count // call.size
                lengths = Lengths.per_rank(call.counts, call.out_counts, each, pieces)
            else:
                lengths = Lengths.even(call.count, count, pieces)
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            segments, itemsize = (1, 1), max(call.dtype.itemsize, 1)
            if self._algorithm.local and self.mixed:
                longest = max(lengths.outgoing, default=0) * itemsize
                segments = self._pipelining.between_nodes(self._algorithm, longest)
            align = max(1, _LINE // itemsize)
            found = self._layouts[key] = Layout(self, self._place, lengths, align, segments)
        return found


class Plans:
    """The plans of schedules in one memory, which `groups` of ranks share; each is made once."""

    def __init__(self, groups: Sequence[Sequence[int]], arity: int, pipelining: Segmentation):
        self._groups: Groups = tuple([tuple(group) for group in groups])
        self._how = arity, pipelining
        self._plans: dict[Hashable, Plan] = {}

    def find(self, call: Call, choice: Choice, pieces: int = 1) -> Plan:
        """Return the plan of a schedule for the ranks and the root of a call."""
        # One of its levels may have another schedule by now.
        key = (choice.algorithm, choice.arity, call.root, pieces, GENERATION[0])
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _KEPT:
                self._plans.clear()
            found = self._plans[key] = Plan(call, choice, self._groups, *self._how, pieces)
        return found

    def fitting(
        self, call: Call, choice: Choice, pieces: int, fits: Callable[[Plan], bool]
    ) -> Plan:
        """Return the plan with `pieces` of each block, doubled until it fits into a slot.

        A slot has one size for all calls: what is longer goes through it piece by piece.  A plan
        that does not fit even in pieces of one element is returned, too: its caller refuses it.
        """
        elements = longest_block(call, choice) // max(call.dtype.itemsize, 1)
        plan = self.find(call, choice, pieces)
        while "pieces" in choice.algorithm.uses and pieces < elements and not fits(plan):
            pieces = min(2 * pieces, elements)
            plan = self.find(call, choice, pieces)
        return plan


def longest_block(call: Call, choice: Choice) -> int:
    """Return the bytes of the longest block of a call by a schedule, before it is cut."""
    if call.counts:
        return max(call.counts) * call.dtype.itemsize
    return -(-call.nbytes // choice.algorithm.block_count(call.size))


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


class Segments(NamedTuple):
    """Rounds of messages, in strands that run side by side: one for each piece of the blocks."""

    strands: list[list[list[Placed]]]
    window: int


class Layout:
    """A schedule with lengths: each step has pieces of arrays, not bound to memory yet."""

    def __init__(
        self,
        plan: Plan,
        where: tuple[int, int, int],
        lengths: Lengths,
        align: int,
        segments: tuple[int, int],
    ):
        self._segmented = segments
        self.plan, self._lengths, self._rank = plan, lengths, where[0]
        self.lengths: dict[Any, int] = {}  # elements of each array, by what stands for it
        self._keys: dict[Key, Key] = {}
        phases, contract, rank = plan.phases, plan.contract, where[0]
        self._in_slots: dict[Key, list[int]] = self._slot_blocks()
        self.starts, at = {}, 0  # the element at which each part of a slot begins
        for kind in plan.slots:
            self.starts[kind] = at
            longest = max([sum(found) for (_, k), found in self._in_slots.items() if k == kind])
            at += -(-longest // align) * align
        self.slot_elements = at
        x, out = (
            self._array(rank, buffer) if plan.ranges[buffer][rank] else None
            for buffer in ("in", "out")
        )
        symbols: Any = _Symbols()
        self._storage = storage = Storage(contract, where, lengths, x, out, symbols)
        # By messages the input is in "out" at the start; in shared memory it is in "in" as well.
        if x is not None and contract.input_buffer == "out":
            storage.where.update({("in", b): at for (_, b), at in storage.where.items()})
        for kind in (*plan.scratch, *plan.slots):
            buffer = "out" if kind == REST else kind
            numbers = self._blocks(rank, kind)
            storage.place(buffer, numbers, self._lengths_of(kind, rank), self._array(rank, kind))
        storage.allocate(_written(rank, phases.rows))
        self.steps: list[list[Any]] = []  # of each phase: a Step, or Segments of messages
        for rows, stored in zip(phases.rows, phases.stored):
            self.steps.append(self._phase(rows))
            for written in sorted(stored):  # by others: to be read there from now on
                storage.write(written)
        if len(self.steps) == 1:  # no meeting: there still is the arrival at the call
            self.steps.append([])
        # Copies (target, source) of blocks of the result that are still elsewhere.
        self.finish: list[Any] = storage.finish()
        self.scratch: list[_Scratch] = [made for made in symbols.scratch if made.size]

    def _slot_blocks(self) -> dict[Key, list[int]]:
        """Return the lengths of the blocks of each slot: a block holds several ones in turn."""
        found: dict[Key, list[int]] = {}
        for cell in self.plan.phases.held:
            owner, kind, block = cell
            lengths = found.setdefault((owner, kind), [])
            lengths += [0] * (block + 1 - len(lengths))
            lengths[block] = self._longest(cell, set())
        return found

    def _longest(self, cell: Cell, seen: set[Cell]) -> int:
        """Return the length of the longest block that a block holds, or held in another slot."""
        held = self.plan.phases.held.get(cell)
        if held is None:
            owner, buffer, block = cell
            return self._lengths_of(buffer, owner)[block]
        seen.add(cell)
        return max([self._longest(source, seen) for source in held - seen], default=0)

    def _array(self, owner: int, kind: str) -> Key:
        """Return what stands for the array with a buffer of a rank: always the same object."""
        key = (owner, kind)
        if key not in self._keys:
            self._keys[key] = key
            numbers = self._blocks(owner, kind)
            self.lengths[key] = sum(self._lengths_of(kind, owner)[numbers.start : numbers.stop])
        return self._keys[key]

    def _blocks(self, owner: int, kind: str) -> range:
        if kind in self.plan.slots:
            return range(len(self._in_slots.get((owner, kind), ())))
        ranges = self.plan.ranges.get(kind)
        return range(self.plan.phases.count) if ranges is None else ranges[owner]

    def _lengths_of(self, kind: str, owner: int) -> Sequence[int]:
        if kind in self.plan.slots:
            return self._in_slots.get((owner, kind), ())
        apart = kind == "in" and self.plan.contract.input_buffer == "in"
        return self._lengths.incoming if apart else self._lengths.outgoing

    def _phase(self, parts: Sequence[Row | Messages]) -> list[Any]:
        """Return the steps of a phase; its rounds of messages stay rounds."""
        steps: list[Any] = []
        for messages, group in groupby(parts, lambda part: isinstance(part, tuple)):
            found: list[Any] = list(group)
            steps += [self._segments(found)] if messages else self.steps_of(found)
        return steps

    def _segments(self, rounds: Sequence[Messages]) -> Segments:
        """Return rounds of messages in a row, cut into segments: each does what the whole does."""
        (count, window), where, strands = self._segmented, self._storage.where, []
        # A round may leave a block in another place, where later rounds find it: each segment has
        # to begin with the places before the first round, not with those the one before it left.
        before = dict(where)
        for k in range(count):
            where.clear()
            where.update(before)
            strands.append([place(one, self._storage, self._rank, (k, count)) for one in rounds])
        return Segments(strands, window)

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
                pieces = self._alike(row, pieces)
                targets = list(pieces[len(sources) :])
            # One copy of both would read what was there before the first of them.
            if not written.isdisjoint(pieces):
                part, written = part + 1, set()
            written.update(targets)
            found.append(((row.ranks, len(sources), len(targets), part), pieces))
        steps = []
        for (ranks, count, *_), group in groupby(found, itemgetter(0)):
            for merged in merge_rows([pieces for _, pieces in group]):
                steps.append(Step(ranks, merged[:count], merged[count:]))
        return steps

    def _alike(self, row: Row, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Return pieces of one length: those in slots, where blocks may be longer, are cut."""
        slots = self.plan.slots
        fixed = {
            stop - at for key, at, stop in pieces if type(key) is not tuple or key[1] not in slots
        }
        length = min(fixed or [stop - at for _, at, stop in pieces])
        if len(fixed) > 1 or any(stop - at < length for _, at, stop in pieces):
            raise ScheduleError("is stored in a block of another length", block=row.sources[0][2])
        return tuple([(key, at, at + length) for key, at, _ in pieces])

    def _place(self, cell: Cell, own: Callable[[tuple[str, int]], Piece]) -> Piece:
        """Return where a block is; ``own(place)`` returns it for those of this rank."""
        owner, buffer, block = cell
        if owner == self._rank:
            return own((buffer, block))
        kind = buffer
        if buffer == "out" and block not in self._blocks(owner, buffer):
            kind = REST
        numbers, lengths = self._blocks(owner, kind), self._lengths_of(kind, owner)
        if block not in numbers:
            raise ScheduleError(f"is not in {buffer!r} of rank {owner}", block=block)
        start = sum(lengths[numbers.start : block])
        return self._array(owner, kind), start, start + lengths[block]


def _written(rank: int, phases: Iterable[Iterable[Row | Messages]]) -> Iterator[tuple[str, int]]:
    """Yield the blocks of a rank that its own steps write."""
    for part in chain.from_iterable(phases):
        if isinstance(part, tuple):
            yield from writes(part)
        else:
            yield from [(buffer, block) for owner, buffer, block in part.targets if owner == rank]
