"""Binding schedules in shared memory: steps become the actions of a kernel, meetings its barriers.

The steps of a schedule are copies and combinations of blocks (:mod:`mpidist.schedule.phases`), laid
out once for each length (:mod:`.layout`).  Here each block gets its memory (:mod:`.reach`).  Rounds
of messages between the meetings are bound as in any other program (:mod:`.binding`)::

    kernel          before | all arrive | phase 1 | barrier | phase 2 | …
    with messages   before | all of this node arrive | … | messages | … | barrier | …
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ..backends.base import Backend, Transfer
from ..backends.program import Action, OperationCheck, Program, Round, Side, store
from ..calls.arrays import address
from ..calls.call import Call
from ..shared_memory.barrier import Barrier, BoardArrival
from ..shared_memory.compiled import LEAST_DEPOSIT, deposit, stream, streams
from ..shared_memory.conditional import TargetedAction
from ..shared_memory.fold import PIECE_BYTES, fold_in_order
from ..shared_memory.heap import Heap
from ..shared_memory.kernel import Phase, assemble, divisor, pieces_of, push
from .binding import Binder
from .layout import Layout, Step
from .reach import Far, Noted, PieceScratch
from .storage import HostMemory, MessageScratch, Piece

_LEAST_PIECE = 64 << 10  # bytes of a piece of another process's array
_PUSHED_PIECE = 64 << 10  # bytes combined at a time, and copied to others' arrays from the cache


class _Pieces(HostMemory):
    """Memory of a binding for its messages: pieces are in the layout's arrays, or in scratch."""

    def __init__(self, arrays: dict[Any, Any], dtype: np.dtype):
        super().__init__(dtype)
        self._arrays = arrays

    def view(self, piece: Piece) -> np.ndarray:  # type: ignore[override]
        """Return the elements of a Piece."""
        key, start, stop = piece
        return (key if isinstance(key, np.ndarray) else self._arrays[key])[start:stop]


class _Checks(NamedTuple):
    """Several checks of a program that the ranks run the same operation."""

    checks: tuple[OperationCheck, ...]

    def name(self, sequence: int, operation: str, fingerprint: int) -> None:
        for check in self.checks:
            check.name(sequence, operation, fingerprint)


class Binding:
    """A schedule bound to the memory of one call, whose arrays it does not keep alive."""

    def __init__(
        self,
        call: Call,
        layout: Layout,
        heap: Heap,
        bank: list[int],  # Program.bank: one number, the set of barrier counters and notes of a run
        arrays: dict[Any, Any],  # by what stands for each in the layout
        before: list[Action],  # before this rank announces its arrival
        opening: Sequence[Action] = (),  # once all ranks of the node have arrived
        *,
        in_place: bool,  # input and result are the same memory
        streams: bool = False,  # long results may be stored past the cache
        aside: PieceScratch | None = None,  # for pieces of arrays that are Far
        closes: bool = False,  # a rank that has finished waits for the others
    ):
        self.plan = plan = layout.plan
        self.layout, self.arrays, self.before, self.opening = layout, arrays, before, opening
        self._heap, self._bank, self._in_place = heap, bank, in_place
        self._streams, self._aside, self._closes = streams, aside, closes
        self._op, self._divisor, self._dtype = call.op, divisor(call), call.dtype
        # A Fold of some ranks only is not the whole sum: a mean is divided in the end then.
        self._folded_by = self._divisor if plan.phases.complete else 0
        self._rank = call.rank
        self._nbytes = call.nbytes if call.out is None else call.out.nbytes
        self._fetched_by_others = (*plan.slots, *plan.scratch)
        self._long: bool | None = None  # is asked for once, if at all: it reads the environment
        # The parts of gather and scatter are stored through the cache.
        parts = plan.contract.per_rank and plan.contract.rooted
        self._may_stream = streams and call.out is not None and not parts

    def kernel(self, slot: int | None = None) -> Program:
        """Return the program: the steps of each phase as actions, with barriers between them."""
        before, (first, *others) = self.before, self.layout.steps
        if first:
            before = [*before, *self._before()]
        phases: list[Phase] = []
        for steps, awaits in zip(others, self.plan.awaits):
            phases.append((self.actions(steps) if steps else [], awaits))
        phases[0][0][:0] = self.opening
        phases[-1][0].extend(self._finish())
        if self._closes:
            phases.append(([], None))
        return assemble(before, phases, self._heap, self._bank, slot)

    def program(
        self, backend: Backend, arrival: BoardArrival, persistent: bool, slot: int | None = None
    ) -> Program:
        """Return the program of a schedule that sends messages, too.

        `arrival` is the arrival of all ranks of the node; for `persistent` see :class:`.Binder`.
        """
        memory, lines = _Pieces(self.arrays, self._dtype), self._heap.lines
        binder = Binder(backend, memory, self._op, persistent, self._bank)
        arena, heard = MessageScratch(memory), set[int]()
        before, items = self.before, list[Round | Side]()

        def add(parts: Sequence[Any], transfer: Transfer | None, actions: Sequence[Action]) -> None:
            """Add the rounds of a phase, behind `transfer` and `actions`."""
            # parts    Step, Step                   | Segments           | Step
            # items    Round(transfer, actions + 2) | rounds of messages | Round(None, 1 action)
            for steps, group in groupby(parts, lambda part: type(part) is Step):
                if steps:
                    actions = [*actions, *self.actions(list(group))]
                    continue
                if transfer or actions:
                    items.append(Round((), transfer, tuple(actions)))
                transfer, actions = None, []
                for segments in group:
                    items.extend(binder.side(segments.strands, segments.window, arena, heard))
            if transfer or actions:
                items.append(Round((), transfer, tuple(actions)))

        first, *others = self.layout.steps
        meetings: list[Transfer] = [Barrier(lines, self._bank, a) for a in self.plan.awaits]
        if self.plan.phases.messages_first:
            add(first, arrival, self.opening)
        else:
            before, meetings[0] = [*before, *self._before()], arrival
        for parts, meeting in zip(others, meetings):
            add(parts, meeting, self.opening if meeting is arrival else [])
        if self._closes:
            add([], Barrier(lines, self._bank), [])
        program = binder.greeted(items, self._finish(), arena.total())
        program.before, program.slot = tuple(before), slot
        checks = [check for check in (arrival, program.named) if check is not None]
        program.named = _Checks(tuple(checks))
        return program

    def _before(self) -> list[Action]:
        """Return the actions of the phase before the first meeting.

        Others are about to read what it stores, which should be in the cache, unless storing there
        is what takes long: then deposits go past it.
        """
        streaming, self._may_stream = self._may_stream, False
        actions = self.actions(self.layout.steps[0])
        self._may_stream = streaming
        return actions

    def _finish(self) -> list[Action]:
        """Return the actions in the end: copies to the result from elsewhere, and a division."""
        actions: list[Action] = []
        for target, source in self.layout.finish:
            if not self._in_place or self._differ(target, source):
                actions.append(store(self._view(target), self._view(source)))
        out = self.arrays.get((self._rank, "out"))
        if self._divisor and not self.plan.phases.complete and out is not None:
            actions.append(HostMemory.divide(out, out, self._divisor))
        return actions

    def actions(self, steps: Sequence[Step]) -> list[Action]:
        """Return the actions of steps, of which those on noted arrays are bound when they run."""
        actions: list[Action] = []
        if not self.plan.noted:
            for step in steps:
                actions += self.bound(step)
            return actions
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
        if self._aside is not None:
            far = [type(self.arrays[key]) is Far for key, _, _ in sources]
            if True in far:
                return self._fetched(step, far, self._aside)
        if not ranks:
            if self._in_place:
                targets = tuple([to for to in targets if self._differ(to, sources[0])])
            pushed = [(self._copy_to(to), self._view(to)) for to in targets]
            return push(self._view(sources[0]), pushed)
        assert self._op is not None
        inputs, outs = [*map(self._view, sources)], [*map(self._view, targets)]
        # In place, what is to be overwritten has just been read and is in the cache.
        streamed = self._streams and not self._in_place and self._is_long()
        if not streamed and not self._in_place and outs[0].nbytes >= LEAST_DEPOSIT:
            shared = [to for to in targets if self._read_before(to)]
            if shared:
                kept = [self._view(to) for to in targets if to not in shared]
                return self._combined(inputs, ranks, kept, [*map(self._view, shared)])
        return fold_in_order(self._op, inputs, ranks, outs, self._folded_by, streamed=streamed)

    def _combined(
        self,
        inputs: Sequence[np.ndarray],
        ranks: Sequence[int],
        kept: Sequence[np.ndarray],
        shared: Sequence[np.ndarray],
    ) -> list[Action]:
        """Return the actions that combine arrays in this rank's memory, and copy to the others'.

        A sum stored where others have read before took 2.5 times as long in far cores (256 KiB).
        """
        assert self._op is not None
        op, by, count, itemsize = self._op, self._folded_by, inputs[0].size, inputs[0].itemsize
        aside = None if kept else np.empty(min(count, _PUSHED_PIECE // itemsize or 1), self._dtype)
        scratch: dict[str, np.ndarray] = {}
        actions: list[Action] = []
        for part in pieces_of(count, itemsize, _PUSHED_PIECE):
            results = [out[part] for out in kept]
            if aside is not None:
                results = [aside[: part.stop - part.start]]
            actions += fold_in_order(op, [x[part] for x in inputs], ranks, results, by, scratch)
            actions += [deposit(out[part], results[0]) for out in shared]
        return actions

    def _read_before(self, piece: Piece) -> bool:
        """Return whether ranks read in a piece what others store there, call after call."""
        key = piece[0]
        return type(key) is tuple and (key[0] != self._rank or key[1] in self._fetched_by_others)

    def _copy_to(self, piece: Piece) -> Any:
        """Return the function that copies to a piece."""
        if self._may_stream and self._is_long():
            return stream
        return deposit if self._read_before(piece) else store

    def _fetched(self, step: Step, far: Sequence[bool], aside: PieceScratch) -> list[Action]:
        """Return the actions of a step with arrays of other processes, fetched piece by piece."""
        ranks, sources, targets = step
        outs = [self._view(to) for to in targets]
        if not ranks:
            key, start, _ = sources[0]
            return [self.arrays[key].fetch(start, out) for out in outs]
        assert self._op is not None
        count, itemsize = outs[0].size, max(self._dtype.itemsize, 1)
        # The pieces of all ranks stay in the cache together.  Much shorter ones cost more than that
        # saves: a MiB took 247 µs in calls of 16 KiB, 109 of 64 KiB, and 74 of 256 KiB.
        piece = max(_LEAST_PIECE, PIECE_BYTES // len(sources)) // itemsize
        piece = max(1, min(piece, count))
        pieces = aside.pieces(len(sources), piece, self._dtype)
        scratch: dict[str, np.ndarray] = {}
        actions: list[Action] = []
        for at in range(0, count, piece):
            length = min(piece, count - at)
            inputs = []
            for (key, start, _), held, fetched in zip(sources, pieces, far):
                if fetched:
                    inputs.append(held[:length])
                    actions.append(self.arrays[key].fetch(start + at, inputs[-1]))
                else:
                    inputs.append(self.arrays[key][start + at : start + at + length])
            part = [out[at : at + length] for out in outs]
            actions += fold_in_order(self._op, inputs, ranks, part, self._folded_by, scratch)
        return actions

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
        bank = self._bank
        watched: list[weakref.ref] = []

        def find(action: TargetedAction) -> list[Action]:
            bound = action.bound
            moved = [array.find(bank) for array in found]  # all of them: `any` would stop early
            if True in moved or not watched:
                for array in found:
                    array.check()
                bound = [one for step in steps for one in self.bound(step)]
                # The notes stay as they are if this rank unmaps the memory: compiled code, which
                # compares only them, would go on to use it.
                watched[:] = [weakref.ref(array.memory(), action.invalidate) for array in found]
            action.set_expected([word for array in found for word in array.noted])
            return bound

        indices = [index for array in found for index in array.indices([0])]
        return TargetedAction(self._heap.lines.words, indices, find)
