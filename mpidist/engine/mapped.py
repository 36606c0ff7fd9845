"""Binding schedules in shared memory to the actions of a kernel, on arrays of ``comm.empty``.

The steps of a schedule are copies and combinations of blocks (:mod:`mpidist.schedule.phases`), laid
out once for each length (:mod:`.layout`).  Here each block gets its memory: this rank's arrays,
those of the other ranks, or scratch memory.  What others read or write is in symmetric memory::

    in, out     at the same location on every rank, found when the call is bound; of collectives
                in which the root or the ranks have parts: wherever the rank's notes say
    tmp         beside such an array, in its shadow
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ..backends.program import Action, Program, store
from ..calls.arrays import address, view_at
from ..calls.call import Call
from ..errors import InvalidArgument
from ..operations import is_half, is_mean
from ..schedule.registry import Choice
from ..shared_memory.compiled import stream, streams
from ..shared_memory.conditional import ConditionalAction, TargetedAction
from ..shared_memory.fold import fold_in_order
from ..shared_memory.heap import Heap, Location
from ..shared_memory.kernel import Phase, assemble, divisor, push, unowned
from .layout import ARGUMENT, Plan, Step
from .storage import HostMemory, Piece

_KEPT = 1024  # plans, by algorithm and root
_NOTES = {"in": 3, "out": 5}  # a rank's notes: allocation number and offset of each buffer


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
        self._plans: dict[Hashable, Plan] = {}

    def why_not(self, call: Call, choice: Choice, background: bool) -> str | None:
        """Return why a schedule cannot run on the arrays of a call, or None if it can."""
        plan = self.plan(call, choice)
        if plan.phases.why_not:
            return plan.phases.why_not
        if call.uneven_alltoall:
            return "the counts of the other ranks are unknown (uneven alltoall)"
        if is_mean(call.op) and is_half(call.dtype) and not plan.phases.complete:
            return f"it combines in several steps, in which a mean of {call.dtype} may overflow"
        if plan.needs_lines and not self._heap.has_lines:
            return "it has several meetings, and there is no array of comm.empty() yet"
        return plan.why_not(call, self._heap, background)

    def agreed(self, call: Call, choice: Choice) -> str:
        """Return the locations of a call's arrays, as text that ranks compare."""
        found = self.plan(call, choice).locations(call, self._heap)
        return " ".join([f"{buffer} {location.key}" for buffer, location in found.items()])

    def program(self, call: Call, choice: Choice) -> Program:
        """Bind a call to a schedule: return its new program."""
        return Binding(call, self.plan(call, choice), self._heap, [0]).program()

    def plan(self, call: Call, choice: Choice) -> Plan:
        """Return the plan of a schedule for the ranks and the root of a call."""
        arity = choice.arity or self._arity
        key = (choice.algorithm, arity, call.root)
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _KEPT:
                self._plans.clear()
            found = self._plans[key] = Plan(call, choice.algorithm, arity)
        return found


class Noted:
    """An array of another rank, at the location that this rank has noted.

    Attributes
    ----------
    array : ndarray or None
        A view of it; None before `find`, and where this rank cannot reach it.
    noted : tuple of int
        The notes by which it was found: allocation number and offset.
    """

    def __init__(self, heap: Heap, owner: int, buffer: str, count: int, dtype: np.dtype):
        self._heap, self._owner, self._buffer = heap, owner, buffer
        self._count, self._dtype = count, dtype
        self._location: Location | None = None
        self.noted = (0, 0)
        self.array: Any = None

    def indices(self, tags: list[int]) -> tuple[int, int]:
        """Return the indices in ``heap.lines.words`` of the two notes."""
        first = self._heap.lines.note_index(tags, self._owner) + _NOTES[self._buffer]
        return first, first + 1

    def find(self, tags: list[int]) -> bool:
        """Find the array again; return whether it is another one.

        A view is made only if it has moved: making one takes 3 µs, or 15 if the caches are cold.
        """
        words, (number, offset) = self._heap.lines.words, self.indices(tags)
        noted, before = (words[number], words[offset]), self.array
        if noted == self.noted and before is not None and self.memory() is not None:
            return False
        self.noted, self._location = noted, self._heap.location(*noted)
        location, self.array = self._location, None
        if location is not None:
            self.array = view_at(location.address(self._owner), self._count, self._dtype)
        return self.array is not before

    def memory(self) -> Any:
        """Return the owner of the memory that has the array; None if it is gone."""
        return None if self._location is None else self._location.allocation.owner_ref()

    def check(self) -> None:
        """Raise InvalidArgument if this rank cannot reach the array."""
        if self.array is None:
            rank = self._heap.rank
            raise InvalidArgument(
                f"rank {rank}: {ARGUMENT[self._buffer]} of rank {self._owner} is in an array of "
                f"comm.empty() that rank {rank} has dropped; expected that each rank keeps its own"
            )


class Binding:
    """A plan bound to the memory of one call.

    Parameters
    ----------
    call : Call
        The call, whose arrays are not kept alive.
    plan : Plan
        Its schedule.
    heap : Heap
        The symmetric memory.
    tags : list of int
        ``Program.tags``: one number, the set of barrier counters and notes that a run uses.

    Attributes
    ----------
    plan, layout : Plan, Layout
        The schedule, and its steps for the lengths of the call.
    arrays : dict
        The array of each of the layout's, or a `Noted` for it.
    before : list of callable
        Actions before this rank announces its arrival.
    """

    def __init__(self, call: Call, plan: Plan, heap: Heap, tags: list[int]):
        self.plan, self.layout, self._heap = plan, plan.layout(call), heap
        self._rank, self._size, self._tags = call.rank, call.size, tags
        self._op, self._divisor = call.op, divisor(call)
        self._nbytes = call.nbytes if call.out is None else call.out.nbytes
        self._long: bool | None = None  # is asked for once, if at all: it reads the environment
        # The parts of gather and scatter are stored through the cache.
        parts = plan.contract.per_rank and plan.contract.rooted
        self._may_stream = call.out is not None and not parts
        self._in_place = call.in_place
        self.before: list[Action] = []
        self.arrays = self._found(call)
        for buffer in plan.noted:
            data = call.x if buffer == "in" else call.out
            if (call.rank, buffer) in plan.phases.reached and data is not None:
                self.before.append(self._note(buffer, heap.find(data)))

    def _found(self, call: Call) -> dict[Any, Any]:
        """Return the array of each of the layout's, or a `Noted` for it."""
        plan, layout, dtype = self.plan, self.layout, call.dtype
        found = plan.locations(call, self._heap)
        arrays: dict[Any, Any] = {}
        for scratch in layout.scratch:
            arrays[scratch] = np.empty(scratch.size, dtype)
        for key, count in layout.lengths.items():
            owner, kind = key
            if kind in plan.scratch:
                arrays[key] = found[kind].shadow(owner, count, dtype)
            elif kind in found:
                arrays[key] = view_at(found[kind].address(owner), count, dtype)
            elif owner != self._rank:
                arrays[key] = Noted(self._heap, owner, kind, count, dtype)
            else:
                arrays[key] = unowned(call.x if kind == "in" else call.out)
        if plan.may_copy and found["in"] is found.get("out"):  # the same object: see locations
            self.before.append(store(arrays[self._rank, "out"], unowned(call.x)))
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
        phases, layout = self.plan.phases, self.layout
        parts = [self.actions(steps) if steps else [] for steps in layout.steps[1:]] or [[]]
        before: list[Action] = []
        if layout.steps[0]:
            # Others are about to read what this stores: it should be in the cache.
            streaming, self._may_stream = self._may_stream, False
            before = self.actions(layout.steps[0])
            self._may_stream = streaming
        for target, source in layout.finish:
            if not self._in_place or self._differ(target, source):
                parts[-1].append(store(self._view(target), self._view(source)))
        out = self.arrays.get((self._rank, "out"))
        if self._divisor and not phases.complete and out is not None:
            parts[-1].append(HostMemory.divide(out, out, self._divisor))
        body: list[Phase | list[Action]] = [parts[0]]
        for actions, awaits in zip(parts[1:], phases.awaits[1:]):
            if len(awaits) == self._size - 1:
                body.append(actions)
            else:
                body.append(Phase(actions, awaits))
        return assemble(([*self.before, *before], body), self._heap, self._tags)

    def actions(self, steps: Sequence[Step]) -> list[Action]:
        """Return the actions of a phase, of which those on noted arrays are bound when they run."""
        if not self.plan.noted:
            return [action for step in steps for action in self.bound(step)]
        actions: list[Action] = []
        for noted, group in groupby(steps, lambda step: bool(self.noted(step))):
            if noted:
                actions.append(self._targeted(list(group)))
            else:
                actions += [one for step in group for one in self.bound(step)]
        return actions

    def noted(self, step: Step) -> list[Noted]:
        """Return the arrays of a step that are found by notes."""
        arrays = [self.arrays[key] for key, _, _ in (*step.sources, *step.targets)]
        return [array for array in arrays if type(array) is Noted]

    def bound(self, step: Step) -> list[Action]:
        """Return the actions of a step, whose noted arrays have been found."""
        ranks, sources, targets = step
        if not ranks:
            if self._in_place:
                targets = tuple([to for to in targets if self._differ(to, sources[0])])
            copy = stream if self._may_stream and self._is_long() else store
            return push(self._view(sources[0]), [self._view(to) for to in targets], copy)
        assert self._op is not None
        inputs, outs = [self._view(s) for s in sources], [self._view(t) for t in targets]
        # In place, what is to be overwritten has just been read and is in the cache.
        streamed = not self._in_place and self._is_long()
        by = self._divisor if self.plan.phases.complete else 0
        return fold_in_order(self._op, inputs, ranks, outs, by, streamed=streamed)

    def _is_long(self) -> bool:
        if self._long is None:
            self._long = streams(self._nbytes)
        return self._long

    def _differ(self, one: Piece, other: Piece) -> bool:
        """Return whether two pieces are different memory: a call may be in place."""
        arrays = self.arrays[one[0]], self.arrays[other[0]]
        if Noted in map(type, arrays):
            return True
        return address(self._view(one)) != address(self._view(other))

    def _view(self, piece: Piece) -> np.ndarray:
        key, start, stop = piece
        array = self.arrays[key]
        return (array.array if type(array) is Noted else array)[start:stop]

    def _targeted(self, steps: Sequence[Step]) -> TargetedAction:
        """Return the action of steps on noted arrays, which finds these at each run."""
        found = list(dict.fromkeys(array for step in steps for array in self.noted(step)))
        tags = self._tags
        watched: list[weakref.ref] = []

        def find(action: TargetedAction) -> list[Action]:
            bound = action.bound
            moved = [array.find(tags) for array in found]  # all of them: `any` would stop early
            if True in moved or not watched:
                for array in found:
                    array.check()
                bound = [one for step in steps for one in self.bound(step)]
                watched[:] = [weakref.ref(array.memory(), action.invalidate) for array in found]
            action.set_expected([word for array in found for word in array.noted])
            return bound

        indices = [index for array in found for index in array.indices([0])]
        return TargetedAction(self._heap.lines.words, indices, find)
