"""The ``symmetric`` executor: it runs schedules in the arrays of ``comm.empty``.

What other ranks read or write is in symmetric memory::

    in, out     at the same location on every rank, found when the call is bound; of collectives
                in which the root or the ranks have parts: wherever the rank's notes say
    tmp         beside such an array, in its shadow
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.executor import ONCE, Use
from ..backends.program import Action, Program, Round, store
from ..calls.arrays import view_at
from ..calls.call import Call
from ..operations import divides_first
from ..schedule.registry import Choice, find
from ..selection.names import STAGED, SYMMETRIC
from ..shared_memory.conditional import ConditionalAction
from ..shared_memory.heap import Heap, Location
from ..shared_memory.host import Host
from ..shared_memory.in_place import (
    NEEDS,
    OR_IN_PLACE,
    location_of,
    memory_key,
    source_of,
)
from ..shared_memory.kernel import one_shot, unowned
from .layout import ARGUMENT, Plan
from .one_sided import Binding
from .reach import NOTES, Noted
from .rooted import rooted_program
from .schedules import UNEVEN, ScheduleExecutor

_SHIPPED = {
    "allreduce": ("in_place",),
    "reduce_scatter": ("in_place",),
    "allgather": ("in_place",),
    "broadcast": ("in_place",),
    "alltoall": ("in_place",),
    "scan": ("in_place",),
    "exscan": ("in_place",),
    "reduce": ("in_place", "in_place_fetched"),
    "gather": ("in_place", "in_place_fetched"),
    "scatter": ("in_place", "in_place_stored"),
}
"""The schedules of each collective; of two, each rank takes one (see :mod:`.rooted`)."""


class Symmetric(ScheduleExecutor):
    """Executor of the barrier, and of collectives directly in the arrays of ``comm.empty``."""

    name, summary = SYMMETRIC, "every rank reads and writes the others' memory in place"
    memory = "mapped"

    def __init__(self, host: Host):
        super().__init__(host)
        self._shipped = {
            collective: [find(collective, name) for name in names]
            for collective, names in _SHIPPED.items()
        }
        self._one_shot = find("reduce", "in_place_one_shot")

    def schedules(self, collective: str) -> list[Choice]:
        """Return those for symmetric arrays on all ranks: one, and a short one for reduce."""
        if collective == "barrier":
            return [find("barrier", "in_place")]
        own = self._shipped.get(collective, [])[:1]
        return [*own, self._one_shot] if collective == "reduce" else own

    def refuses(self, call: Call, background: bool) -> str | None:
        """Return why the call cannot be served, usually a private array; None if it can."""
        assert self.heap is not None
        if call.collective == "barrier":
            return None
        if call.collective not in NEEDS:
            return f"there is no {call.collective} in symmetric memory"
        if location_of(call, self.heap) is None:
            return f"{NEEDS[call.collective]} was not allocated by comm.empty()"
        return UNEVEN if call.uneven_alltoall else None

    def lacks(self, plan: Plan, call: Call, background: bool) -> str | None:
        """Return why the arrays of a call are not in the memory that others reach."""
        heap = self.heap
        assert heap is not None
        parted = divides_first(call.op, call.dtype) and not plan.phases.complete
        if parted and call.collective != "allreduce":
            return f"it combines in several steps, in which a mean of {call.dtype} may overflow"
        found = _locations(plan, call, heap, background)
        for buffer in plan.shared:
            if buffer not in found:
                wanted = "out" if buffer == "in" and plan.may_copy else buffer
                return f"{ARGUMENT[wanted]} was not allocated by comm.empty()"
        for buffer in plan.noted:
            data = call.x if buffer == "in" else call.out
            mine = (call.rank, buffer) in plan.phases.reached and data is not None and data.size
            if mine and heap.find(data) is None:
                return f"{ARGUMENT[buffer]} was not allocated by comm.empty()"
        for buffer in plan.scratch:
            if buffer not in found:
                beside = [ARGUMENT[b] for b in plan.whole if b == "out" or not background]
                return (
                    f"others reach its scratch memory {buffer!r}, which is beside an array of "
                    f"comm.empty(): expected one as {' or '.join(beside) or 'a whole array'}"
                )
        if plan.needs_lines and not heap.has_lines:
            return "it has several meetings, and there is no array of comm.empty() yet"
        return None

    def unknown(self, call: Call, choice: Choice, background: bool) -> str | None:
        """Return which array must be symmetric besides that of `NEEDS`, or None."""
        plan, need = self.plan(call, choice), NEEDS.get(call.collective, "")
        beside = [ARGUMENT[b] for b in plan.whole if b == "out" or not background]
        wanted = {*plan.needs, *map(ARGUMENT.__getitem__, plan.noted)} - {need}
        if len(plan.scratch) > beside.count(need):
            wanted |= {*beside} - {need}
        if not wanted:
            return None
        return f"only each rank knows whether its {' and '.join(sorted(wanted))} is in comm.empty()"

    def depends_on(self, call: Call) -> tuple[bool, bool]:
        """Return whether this rank's array is in symmetric memory, as the call requires it.

        And whether others read its input in another one, of collectives that may be in place.
        """
        heap = self.heap
        if heap is None or location_of(call, heap) is None:
            return False, False
        return True, source_of(call, heap) is not None

    def rivals(self, call: Call) -> Sequence[str]:
        """Return the executor of slots, but where the call may be in place on some ranks.

        In far cores what others have read takes long to be written again, and they read the slots
        instead.  The bits are the same.  In place nothing comes near; but of that ranks do not know
        of each other, and they have to choose alike.
        """
        apart = call.collective not in OR_IN_PLACE or self.depends_on(call)[1]
        return (STAGED,) if apart else ()

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return how the call is served, and where its array is, as text that ranks compare."""
        heap = self.heap
        assert heap is not None
        if choice is not None:
            plan = self.plan(call, choice)
            found = _locations(plan, call, heap)
            where = " ".join([f"{buffer} {location.key}" for buffer, location in found.items()])
            return f"by {choice.name} in symmetric memory {where}".rstrip()
        location = location_of(call, heap)
        return "in symmetric memory" + (
            "" if location is None else f" {memory_key(call, location, heap)}"
        )

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        """Return the program of a schedule: the one that the call names, or those of `_SHIPPED`.

        In the background its first round waits for all ranks, as the engine does before a blocking
        call.
        """
        choices = self._own(call, use.background) if choice is None else [choice]
        if len(choices) == 1:
            return self.program(call, self.plan(call, choices[0]), use)
        bank = [0]
        if choices:
            direct, otherwise = (self.binding(self.plan(call, c), call, bank) for c in choices)
            last = use.background or call.collective != "reduce"
            assert self.heap is not None
            program = rooted_program(call, direct, otherwise, self.heap, bank, last)
        else:
            program = Program([], meets=True)
        if use.background:
            arrival = self.arrival(program.bank)
            program.items = [Round((), arrival, ()), *program.items]
            program.named, program.meets = arrival, False
        return program

    def _own(self, call: Call, background: bool) -> list[Choice]:
        """Return the schedules of a call that names none; the barrier needs none."""
        if call.collective == "reduce" and one_shot(call):
            # It saves a barrier: 4 KiB in 0.6 to 0.8 of the time on 2 and 4 ranks, 64 KiB in the
            # same; from 256 KiB on it would take 1.15 to 1.5 times as long.
            return [self._one_shot]
        if call.collective == "reduce" and background:
            # Not in_place_fetched: operations on one input would share the memory beside it.
            return [self._shipped["reduce"][0], self._one_shot]
        return self._shipped.get(call.collective, [])

    def binding(self, plan: Plan, call: Call, bank: list[int], turn: int = 0) -> Binding:
        """Return a plan bound to the arrays of a call, with notes on those that others find."""
        heap, layout, dtype, rank = self.heap, plan.layout(call), call.dtype, call.rank
        assert heap is not None
        found, at = _locations(plan, call, heap), plan.at
        arrays: dict[Any, Any] = {}
        for scratch in layout.scratch:
            arrays[scratch] = np.empty(scratch.size, dtype)
        for key, count in layout.lengths.items():
            owner, kind = key
            if kind in plan.scratch:
                arrays[key] = found[kind].shadow(at[owner], count, dtype)
            elif kind in found:
                arrays[key] = view_at(found[kind].address(at[owner]), count, dtype)
            elif owner != rank:
                arrays[key] = Noted(heap, key, at[owner], rank, count, dtype)
            else:
                arrays[key] = unowned(call.x if kind == "in" else call.out)
        before: list[Action] = []
        in_place = call.in_place
        if plan.may_copy and found["in"] is found.get("out"):  # the same object: see _locations
            before.append(store(arrays[rank, "out"], unowned(call.x)))
            in_place = True
        for buffer in plan.noted:
            data = call.x if buffer == "in" else call.out
            if (rank, buffer) in plan.phases.reached and data is not None:
                before.append(_note(heap, bank, buffer, heap.find(data)))
        return Binding(call, layout, heap, bank, arrays, before, in_place=in_place, streams=True)


def _locations(plan: Plan, call: Call, heap: Heap, background: bool = False) -> dict[str, Location]:
    """Return the locations of a plan's shared and scratch buffers, where they have one."""
    data = {"in": call.x, "out": call.out}
    found: dict[str, Location] = {}
    for buffer in plan.shared:
        location = heap.find(data[buffer])
        if location is not None:
            found[buffer] = location
    if plan.may_copy and "in" not in found:
        location = found.get("out") or heap.find(call.out)
        if location is not None:
            found["in"] = found["out"] = location  # one object, only here: x is to be copied
    if plan.scratch:
        # Operations in the background may read one input at once, but share no shadow.  The array
        # that must be symmetric comes first: the other one may be anywhere on each rank.
        beside = [b for b in plan.whole if b == "out" or not background]
        beside.sort(key=lambda b: ARGUMENT[b] != NEEDS.get(call.collective))
        free = [location for b in beside if (location := heap.find(data[b])) is not None]
        for buffer, location in zip(plan.scratch, dict.fromkeys(free)):
            found[buffer] = location
    return found


def _note(heap: Heap, bank: list[int], buffer: str, location: Location | None) -> Action:
    """Return the action that writes where this rank's array is, before the arrival."""
    lines, note = heap.lines, NOTES[buffer]
    noted = (0, 0) if location is None else (location.allocation.number, location.offset)
    # Compiled code skips the write if the note has these words from an earlier call.  It looks into
    # bank 0, as it runs blocking calls only; Python writes always, into the bank that a run takes.
    words, first = lines.words, lines.note_index([0], lines.rank) + note

    def write() -> None:
        at = lines.note_index(bank, lines.rank) + note
        words[at], words[at + 1] = noted

    return ConditionalAction(words, (first, first + 1), noted, write)
