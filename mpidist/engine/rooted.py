"""Reduce, gather and scatter in symmetric memory, where the root's array may be out of reach.

An array that only the root has need not be symmetric, and the other ranks learn where it is, or
that it is private, only when the call runs.  So there are two schedules, and each rank takes the
one that it can.  A gather on ranks 0 (the root), 1 and 2, where rank 2 has dropped the root's
array::

    rank 1    meet, Put in the root's array, meet                                 (in_place)
    rank 2    meet,                          meet,                meet the root   (in_place_fetched)
    rank 0    meet, Copy its own part,       meet, Get from 2,    meet            (both)

The ranks note where their arrays are before they arrive; rank 2 notes that it has not reached the
root's before the second meeting.
"""

from __future__ import annotations

import weakref

from ..backends.program import Action, Program
from ..calls.call import Call
from ..schedule.phases import Row
from ..shared_memory.conditional import ConditionalAction, TargetedAction
from ..shared_memory.heap import Heap
from ..shared_memory.kernel import Phase, assemble
from .layout import Plan, Step
from .one_sided import Binding
from .reach import Noted

_UNREACHED = 0  # note: whether a rank cannot reach the root's array


def rooted_program(
    call: Call, reached: Binding, apart: Binding, heap: Heap, bank: list[int], last: bool = True
) -> Program:
    """Return the program of a call that is bound to two schedules.

    `reached` is that of ranks that reach the root's array: one phase between two meetings.  `apart`
    is that of ranks that do not: what such a rank could not do, the root does for it, between the
    two meetings or after them; here it does so after the second one.  With `last` the root then
    touches the memory of other ranks, which meet it once more.
    """
    flags = _Flags(heap, bank)
    part = _of_root if call.rank == call.root else _of_others
    phases = part(call.root, reached, apart, flags)
    if not last:
        phases.pop()
    return assemble([*reached.before, *apart.before], phases, heap, bank)


class _Flags:
    """The ranks' notes that they do not reach the root's array."""

    def __init__(self, heap: Heap, bank: list[int]):
        self.lines, self.bank, self.words = heap.lines, bank, heap.lines.words

    def index(self, rank: int, bank: list[int]) -> int:
        """Return the index in the words of the note of a rank."""
        return self.lines.note_index(bank, rank) + _UNREACHED

    def fixed(self, *ranks: int) -> list[int]:
        """Return the indices in blocking calls, on which compiled code skips an action."""
        return [self.index(rank, [0]) for rank in ranks]


def _of_root(root: int, reached: Binding, apart: Binding, flags: _Flags) -> list[Phase]:
    """Return the root's phases: its own part, what other ranks could not do, and nothing."""
    others = [rank for rank in range(flags.lines.size) if rank != root]
    steps: dict[int, list[Step]] = {}

    def serve(rank: int) -> None:
        if rank not in steps:
            steps[rank] = apart.layout.steps_of(_served(rank, reached.plan, apart.plan))
        for step in steps[rank]:
            for array in apart.noted(step):
                array.find(flags.bank)
                array.check()
            for action in apart.bound(step):
                action()

    def serve_unreached() -> None:
        for rank in others:
            if flags.words[flags.index(rank, flags.bank)]:
                serve(rank)

    zeros = [0] * len(others)
    action = ConditionalAction(flags.words, flags.fixed(*others), zeros, serve_unreached)
    return [(reached.actions(reached.layout.steps[1]), None), ([action], None), ([], ())]


def _served(rank: int, direct: Plan, otherwise: Plan) -> list[Row]:
    """Return the root's rows that store at `rank`, or what `rank` would store at the root."""
    stored = {place: by for part in direct.phases.stored for place, by in part.items()}
    return [
        row
        for rows in otherwise.phases.rows
        for row in rows
        if isinstance(row, Row)
        and any(
            owner == rank or stored.get((buffer, block)) == rank
            for owner, buffer, block in row.targets
        )
    ]


def _of_others(root: int, reached: Binding, apart: Binding, flags: _Flags) -> list[Phase]:
    """Return another rank's phases: its part of one schedule or the other, and two empty ones.

    It awaits the root in the last barrier only if the root needs its memory.
    """
    words, bank, mine = flags.words, flags.bank, flags.lines.rank
    (array,) = (found for found in reached.arrays.values() if type(found) is Noted)
    watched: list[weakref.ref] = []
    tried: list[bool] = []

    def find(action: TargetedAction) -> list[Action]:
        bound, moved = action.bound, array.find(bank)
        unreached = array.array is None
        words[flags.index(mine, bank)] = unreached
        if moved or not tried:
            tried.append(True)
            half = apart if unreached else reached
            bound = [one for step in half.layout.steps[1] for one in half.bound(step)]
        if unreached:
            action.invalidate()
        else:
            watched[:] = [weakref.ref(array.memory(), action.invalidate)]
            action.set_expected([*array.noted, 0])
        return bound

    second = reached.plan.phases.awaits[1]
    everyone = len(second) == flags.lines.size - 1
    # Whom the root serves: this rank; or if all have met, any rank, with the memory of this one.
    served = [rank for rank in range(flags.lines.size) if rank != root] if everyone else [mine]

    def awaited() -> tuple[int, ...]:
        return (root,) if any(words[flags.index(rank, bank)] for rank in served) else ()

    action = TargetedAction(words, [*array.indices([0]), *flags.fixed(mine)], find)
    last = ConditionalAction(words, flags.fixed(*served), [0] * len(served), awaited)
    return [([action], None), ([], None if everyone else second), ([], last)]
