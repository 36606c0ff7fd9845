"""The ``single_copy`` executor: it runs schedules on private arrays, which other processes read.

Each rank notes the addresses of its arrays before it is announced.  The others fetch what they
combine piece by piece into scratch memory that stays in cache, and combine it there.  By default
it serves reductions only: collectives that only move data were no faster than those of the MPI
library.

Every program ends with one more meeting: a rank that gave up in the last one of its schedule may
have freed its arrays while others read them, and does not come to this one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends import process_memory
from ..backends.executor import ONCE, Use
from ..backends.program import Program
from ..calls.arrays import address
from ..calls.call import Call
from ..errors import Unsupported
from ..schedule.phases import REST
from ..schedule.registry import Choice, find
from ..selection.names import SINGLE_COPY
from ..shared_memory.host import Host
from ..shared_memory.kernel import unowned
from .layout import Key, Plan
from .one_sided import Binding
from .reach import Far, PieceScratch
from .schedules import ScheduleExecutor

# A rank's notes: addresses of its arrays.  Not note 0, of :mod:`.rooted`, which a root still reads
# when the other ranks have begun the next call.
_NOTES = {"in": 1, "out": 2, "tmp": 3, REST: 4}
_SHIPPED = ("allreduce", "reduce", "reduce_scatter")


class SingleCopy(ScheduleExecutor):
    """Executor of reductions of private arrays, which ranks read in each other's processes."""

    name, summary = SINGLE_COPY, "every rank reads the others' private arrays"
    memory = "published"

    def __init__(self, host: Host):
        super().__init__(host)
        self._memory: process_memory.ProcessMemory | None = None
        self._aside = PieceScratch()
        self._scratch: dict[str, np.ndarray] = {}
        self._reason: str | None = None
        self.ready = host.heap is None
        self._shipped = {collective: find(collective, "published") for collective in _SHIPPED}

    def schedules(self, collective: str) -> list[Choice]:
        """Return the one of the collective, if there is one."""
        return [self._shipped[collective]] if collective in self._shipped else []

    def refuses(self, call: Call, background: bool) -> str | None:
        if self._reason is not None:
            return self._reason
        if background:
            return "it cannot run in the background"
        if call.collective not in self._shipped:
            return f"there is no {call.collective} by single copies"
        return None

    def lacks(self, plan: Plan, call: Call, background: bool) -> str | None:
        return self._reason or ("it cannot run in the background" if background else None)

    def make_ready(self) -> None:
        heap = self.heap
        assert heap is not None
        try:
            self._memory = process_memory.connect(heap.rank, heap.ranks, heap.everyone)
            heap.make_lines()
        except (MemoryError, Unsupported) as error:
            self._reason = str(error)
        self.ready = True

    def agreed(self, call: Call, choice: Choice | None) -> str:
        # Ranks with different executors would hang.
        return self.name if choice is None else f"by {choice.name} by single copies"

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        plan = self.plan(call, choice or self._shipped[call.collective])
        return self.program(call, plan, use)

    def binding(self, plan: Plan, call: Call, bank: list[int], turn: int = 0) -> Binding:
        """Return a plan bound to the arrays of a call; each rank notes the addresses of its own."""
        heap, memory = self.heap, self._memory
        assert heap is not None and memory is not None
        layout, dtype, rank, lines = plan.layout(call), call.dtype, call.rank, heap.lines
        arrays: dict[Any, Any] = {}
        addresses: dict[Key, int] = {}
        for scratch in layout.scratch:
            arrays[scratch] = np.empty(scratch.size, dtype)
        for key, count in layout.lengths.items():
            owner, kind = key
            if owner != rank:
                addresses[key] = 0
                arrays[key] = Far(memory, rank, addresses, key)
            elif kind in plan.scratch:
                arrays[key] = self._scratch_of(kind, count, dtype)
            else:
                arrays[key] = unowned(call.x if kind == "in" else call.out)
        own = [
            (_NOTES[kind], address(array))
            for (owner, kind), array in ((k, a) for k, a in arrays.items() if type(k) is tuple)
            if owner == rank and (rank, kind) in plan.phases.reached
        ]

        def write_notes() -> None:
            at = lines.note_index(bank, lines.rank)
            for which, start in own:
                lines.words[at + which] = start

        def read_addresses() -> None:
            words, note_index = lines.words, lines.note_index
            for owner, kind in addresses:
                note = note_index(bank, plan.at[owner]) + _NOTES[kind]
                addresses[owner, kind] = words[note]

        return Binding(
            *(call, layout, heap, bank, arrays, [write_notes], [read_addresses]),
            in_place=call.in_place,
            aside=self._aside,
            closes=True,
        )

    def _scratch_of(self, kind: str, count: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for a scratch buffer that others read; all programs share it in turn."""
        nbytes, held = count * dtype.itemsize, self._scratch.get(kind)
        if held is None or held.nbytes < nbytes:
            held = self._scratch[kind] = np.empty(nbytes, np.uint8)
        return held[:nbytes].view(dtype)
