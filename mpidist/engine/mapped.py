"""Binding schedules in shared memory to the actions of a kernel, on arrays of ``comm.empty``.

The steps of a schedule are copies and combinations of blocks (:mod:`mpidist.schedule.phases`).
Here each block gets its memory: this rank's arrays, those of the other ranks, or scratch memory.
What others read or write is in symmetric memory::

    in, out     at the same location on every rank, found when the call is bound; of collectives
                in which the root or the ranks have parts: wherever the rank's notes say
    tmp         beside such an array, in its shadow
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..backends.program import Action, Program, store
from ..calls.arrays import address, view_at
from ..calls.call import Call
from ..errors import InvalidArgument, ScheduleError
from ..operations import is_half, is_mean
from ..schedule.phases import REST, Cell, Row, phases_of
from ..schedule.registry import Algorithm, Choice
from ..schedule.unrolled import Lengths
from ..shared_memory.compiled import stream, streams
from ..shared_memory.conditional import ConditionalAction, TargetedAction
from ..shared_memory.fold import fold_in_order
from ..shared_memory.heap import Heap, Location
from ..shared_memory.kernel import Phase, assemble, divisor, push, unowned
from .storage import HostMemory, Piece, Storage, merge_rows

_KEPT = 1024  # schedules and layouts, by algorithm, root and lengths
_NOTES = {"in": 3, "out": 5}  # a rank's notes: allocation number and offset of each buffer
_ARGUMENT = {"in": "x", "out": "out"}
Key = tuple[int, str]  # a rank and its buffer
Copier = Callable[[np.ndarray, np.ndarray], Action]


class Mapped:
    """Runs schedules on the arrays of ``comm.empty``.

    A schedule is laid out once for each length of its arrays, and then bound to many.

    Parameters
    ----------
    heap : Heap
        The symmetric memory.
    arity : int
        Number of children of a node in trees.
    """

    def __init__(self, heap: Heap, arity: int):
        self._heap, self._arity = heap, arity
        self._schedules: dict[Hashable, _Schedule] = {}

    def why_not(self, call: Call, choice: Choice, background: bool) -> str | None:
        """Return why a schedule cannot run on the arrays of a call, or None if it can."""
        schedule = self._schedule(call, choice)
        if schedule.phases.why_not:
            return schedule.phases.why_not
        if call.uneven_alltoall:
            return "the counts of the other ranks are unknown (uneven alltoall)"
        if is_mean(call.op) and is_half(call.dtype) and not schedule.phases.complete:
            return f"it combines in several steps, in which a mean of {call.dtype} may overflow"
        if schedule.needs_lines and not self._heap.has_lines:
            return "it has several meetings, and there was not allocated by comm.empty() yet"
        return schedule.why_not(call, self._heap, background)

    def agreed(self, call: Call, choice: Choice) -> str:
        """Return the locations of a call's arrays, as text that ranks compare."""
        found = self._schedule(call, choice).locations(call, self._heap)
        return " ".join([f"{buffer} {location.key}" for buffer, location in found.items()])

    def program(self, call: Call, choice: Choice) -> Program:
        """Bind a call to a schedule: return its new program."""
        schedule = self._schedule(call, choice)
        return _Binding(call, schedule, schedule.layout(call), self._heap).program()

    def _schedule(self, call: Call, choice: Choice) -> _Schedule:
        arity = choice.arity or self._arity
        key = (choice.algorithm, arity, call.root)
        found = self._schedules.get(key)
        if found is None:
            if len(self._schedules) >= _KEPT:
                self._schedules.clear()
            found = self._schedules[key] = _Schedule(call, choice.algorithm, arity)
        return found


class _Schedule:
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
        self._layouts: dict[Hashable, _Layout] = {}

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
                return f"{_ARGUMENT[wanted]} was not allocated by comm.empty()"
        for buffer in self.noted:
            data = call.x if buffer == "in" else call.out
            mine = (call.rank, buffer) in self.phases.reached and data is not None and data.size
            if mine and heap.find(data) is None:
                return f"{_ARGUMENT[buffer]} was not allocated by comm.empty()"
        for buffer in self.scratch:
            if buffer not in found:
                beside = [_ARGUMENT[b] for b in self._whole if b == "out" or not background]
                return (
                    f"others reach its scratch memory {buffer!r}, which is beside an array of "
                    f"comm.empty(): expected one as {' or '.join(beside) or 'a whole array'}"
                )
        return None

    def layout(self, call: Call) -> _Layout:
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
            found = self._layouts[key] = _Layout(self, self._place, lengths)
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


class _Step(NamedTuple):
    """Pieces of memory to copy or combine, and those where the result is stored."""

    ranks: tuple[int, ...]
    sources: tuple[Piece, ...]
    targets: tuple[Piece, ...]


class _Layout:
    """A schedule with lengths: each step has pieces of arrays, which are not bound to memory yet.

    Attributes
    ----------
    steps : list of list of _Step
        The steps of each phase; neighbouring blocks are one step.
    finish : list of (Piece, Piece)
        Copies (target, source) in the end, of blocks of the result that are still elsewhere.
    lengths : dict
        Number of elements of each array, by what stands for it in pieces.
    scratch : list of _Scratch
        What stands for this rank's scratch memory.
    """

    def __init__(self, schedule: _Schedule, place: tuple[int, int, int], lengths: Lengths):
        self._schedule, self._lengths, self._rank = schedule, lengths, place[0]
        self.lengths: dict[Any, int] = {}
        self._keys: dict[Key, Key] = {}
        phases, contract, rank = schedule.phases, schedule.contract, place[0]
        x, out = (
            self._array(rank, buffer) if schedule.ranges[buffer][rank] else None
            for buffer in ("in", "out")
        )
        symbols: Any = _Symbols()
        self._storage = storage = Storage(contract, place, lengths, x, out, symbols)
        if x is not None and contract.input_buffer == "out":
            storage.where.update({("in", b): at for (_, b), at in storage.where.items()})
        for kind in schedule.scratch:
            buffer = "out" if kind == REST else kind
            array = self._array(rank, kind)
            storage.place(buffer, range(phases.count), lengths.outgoing, array)
        targets = (cell for rows in phases.rows for row in rows for cell in row.targets)
        storage.allocate((buffer, block) for owner, buffer, block in targets if owner == rank)
        self.steps: list[list[_Step]] = []
        for rows, stored in zip(phases.rows, phases.stored):
            self.steps.append(self._steps(rows))
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
        ranges = self._schedule.ranges.get(kind)
        return range(self._schedule.phases.count) if ranges is None else ranges[owner]

    def _lengths_of(self, kind: str) -> Sequence[int]:
        apart = kind == "in" and self._schedule.contract.input_buffer == "in"
        return self._lengths.incoming if apart else self._lengths.outgoing

    def _steps(self, rows: Sequence[Row]) -> list[_Step]:
        """Return the steps of a phase; rows of neighbouring blocks that are apart become one."""
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
                steps.append(_Step(ranks, merged[:count], merged[count:]))
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


class _Noted:
    """An array of another rank, at the location that this rank has noted."""

    def __init__(self, heap: Heap, owner: int, buffer: str, count: int, dtype: np.dtype):
        self._heap, self._owner, self._buffer = heap, owner, buffer
        self._count, self._dtype = count, dtype
        self.noted = (0, 0)
        self.location: Location | None = None
        self.array: Any = None

    def indices(self, tags: list[int]) -> tuple[int, int]:
        """Return the indices in ``heap.lines.words`` of the two notes."""
        first = self._heap.lines.note_index(tags, self._owner) + _NOTES[self._buffer]
        return first, first + 1

    def find(self, tags: list[int]) -> bool:
        """Find the array again; return whether it has moved."""
        words, (number, offset) = self._heap.lines.words, self.indices(tags)
        noted, old = (words[number], words[offset]), self.location
        if noted == self.noted and old is not None and old.allocation.owner_ref() is not None:
            return False
        location = self._heap.location(*noted)
        if location is None:
            rank = self._heap.rank
            raise InvalidArgument(
                f"rank {rank}: {_ARGUMENT[self._buffer]} of rank {self._owner} is in an array of "
                f"comm.empty() that rank {rank} has dropped; expected that each rank keeps its own"
            )
        self.noted, self.location = noted, location
        self.array = view_at(location.address(self._owner), self._count, self._dtype)
        return True


class _Binding:
    """Binds the steps of a layout to the memory of one call."""

    def __init__(self, call: Call, schedule: _Schedule, layout: _Layout, heap: Heap):
        self._schedule, self._layout, self._heap = schedule, layout, heap
        self._rank, self._size, self._tags = call.rank, call.size, [0]
        self._op, self._divisor = call.op, divisor(call)
        self._streamed = streams(call.nbytes if call.out is None else call.out.nbytes)
        self._copy = stream if self._streamed and call.out is not None else store
        self._in_place = call.in_place
        self._before: list[Action] = []
        self._arrays = self._found(call)
        for buffer in schedule.noted:
            data = call.x if buffer == "in" else call.out
            if (call.rank, buffer) in schedule.phases.reached and data is not None:
                self._before.append(self._note(buffer, heap.find(data)))

    def _found(self, call: Call) -> dict[Any, Any]:
        """Return the array of each of the layout's, or a `_Noted` for it."""
        schedule, layout, dtype = self._schedule, self._layout, call.dtype
        found = schedule.locations(call, self._heap)
        arrays: dict[Any, Any] = {}
        for scratch in layout.scratch:
            arrays[scratch] = np.empty(scratch.size, dtype)
        for key, count in layout.lengths.items():
            owner, kind = key
            if kind in schedule.scratch:
                arrays[key] = found[kind].shadow(owner, count, dtype)
            elif kind in found:
                arrays[key] = view_at(found[kind].address(owner), count, dtype)
            elif owner != self._rank:
                arrays[key] = _Noted(self._heap, owner, kind, count, dtype)
            else:
                arrays[key] = unowned(call.x if kind == "in" else call.out)
        if schedule.may_copy and found["in"] is found.get("out"):  # the same object: see locations
            self._before.append(store(arrays[self._rank, "out"], unowned(call.x)))
            self._in_place = True
        return arrays

    def _note(self, buffer: str, location: Location | None) -> Action:
        """Return the action that writes where this rank's array is, before the arrival."""
        lines, tags, note = self._heap.lines, self._tags, _NOTES[buffer]
        noted = (0, 0) if location is None else (location.allocation.number, location.offset)
        words, first = lines.words, lines.note_index([0], lines.rank) + note

        def write() -> None:
            at = lines.note_index(tags, lines.rank) + note
            words[at], words[at + 1] = noted

        return ConditionalAction(words, (first, first + 1), noted, write)

    def program(self) -> Program:
        """Return the program: the steps of each phase as actions, with barriers between them."""
        phases, layout = self._schedule.phases, self._layout
        parts = [self._actions(steps) if steps else [] for steps in layout.steps[1:]] or [[]]
        # In the first phase others are about to read what is stored: it should be in the cache.
        self._copy = store
        before = self._actions(layout.steps[0])
        for target, source in layout.finish:
            if not self._in_place or self._differ(target, source):
                parts[-1].append(store(self._view(target), self._view(source)))
        out = self._arrays.get((self._rank, "out"))
        if self._divisor and not phases.complete and out is not None:
            parts[-1].append(HostMemory.divide(out, out, self._divisor))
        body: list[Phase | list[Action]] = [parts[0]]
        for actions, awaits in zip(parts[1:], phases.awaits[1:]):
            if len(awaits) == self._size - 1:
                body.append(actions)
            else:
                body.append(Phase(actions, awaits))
        return assemble(([*self._before, *before], body), self._heap, self._tags)

    def _actions(self, steps: Sequence[_Step]) -> list[Action]:
        """Return the actions of a phase, of which those on noted arrays are bound when they run."""
        if not self._schedule.noted:
            return [action for step in steps for action in self._bound(step, self._copy)]
        actions: list[Action] = []
        for noted, group in groupby(steps, lambda step: bool(self._noted(step))):
            if noted:
                actions.append(self._targeted(list(group)))
            else:
                actions += [one for step in group for one in self._bound(step, self._copy)]
        return actions

    def _noted(self, step: _Step) -> list[_Noted]:
        arrays = [self._arrays[key] for key, _, _ in (*step.sources, *step.targets)]
        return [array for array in arrays if type(array) is _Noted]

    def _bound(self, step: _Step, copy: Copier) -> list[Action]:
        ranks, sources, targets = step
        if not ranks:
            if self._in_place:
                targets = tuple([to for to in targets if self._differ(to, sources[0])])
            return push(self._view(sources[0]), [self._view(to) for to in targets], copy)
        assert self._op is not None
        inputs, outs = [self._view(s) for s in sources], [self._view(t) for t in targets]
        streamed = self._streamed and not self._in_place  # what was just read is in the cache
        by = self._divisor if self._schedule.phases.complete else 0
        return fold_in_order(self._op, inputs, ranks, outs, by, streamed=streamed)

    def _differ(self, one: Piece, other: Piece) -> bool:
        """Return whether two pieces are different memory: a call may be in place."""
        arrays = self._arrays[one[0]], self._arrays[other[0]]
        if _Noted in map(type, arrays):
            return True
        return address(self._view(one)) != address(self._view(other))

    def _view(self, piece: Piece) -> np.ndarray:
        key, start, stop = piece
        array = self._arrays[key]
        return (array.array if type(array) is _Noted else array)[start:stop]

    def _targeted(self, steps: Sequence[_Step]) -> TargetedAction:
        """Return the action of steps on noted arrays, which finds these at each run."""
        found = list(dict.fromkeys(array for step in steps for array in self._noted(step)))
        tags, copy = self._tags, self._copy
        watched: list[weakref.ref] = []

        def find(action: TargetedAction) -> list[Action]:
            bound = action.bound
            moved = [array.find(tags) for array in found]  # all of them: `any` would stop early
            if True in moved or not watched:
                bound = [one for step in steps for one in self._bound(step, copy)]
                places = [array.location for array in found if array.location is not None]
                owners = [place.allocation.owner_ref() for place in places]
                watched[:] = [weakref.ref(owner, action.invalidate) for owner in owners]
                action.set_expected([word for array in found for word in array.noted])
            return bound

        indices = [index for array in found for index in array.indices([0])]
        return TargetedAction(self._heap.lines.words, indices, find)
