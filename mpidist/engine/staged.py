"""The ``staged`` executor: it runs schedules on private arrays, through slots of shared memory.

A rank copies the data that the others need into its slot, announces its arrival, and reads the
others' slots when all ranks have arrived.  Two slots take turns, so no rank waits until its slot
has been read: it is used again when every rank has arrived at a later call.  Long arrays go piece
by piece (see :mod:`mpidist.algorithms.slots`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from ..backends.executor import ONCE, Use
from ..backends.program import Program
from ..calls.arrays import view_at
from ..calls.call import Call
from ..errors import Unsupported
from ..operations import ANY
from ..schedule.registry import Choice, find
from ..selection.names import STAGED
from ..shared_memory.heap import STAGING_BYTES
from ..shared_memory.host import Host
from ..shared_memory.kernel import one_shot, unowned
from .layout import Plan, longest_block
from .one_sided import Binding
from .schedules import UNEVEN, ScheduleExecutor

_MAX_SHARED_BYTES = 1 << 20  # largest calls that share a program; at 2 MiB copying costs as much
# Bytes up to which data that only move go through slots by the executor's name, and so by "auto":
# later calls of longer arrays gain less than binding takes in the first two.  A broadcast of 64 MiB
# took 1.7 and 2.8 times the library's time in these, and 0.8 to 1 afterwards.
_MOST_MOVED = 16 << 20
_SHIPPED = (
    *("allreduce", "reduce", "reduce_scatter", "allgather"),
    *("broadcast", "gather", "scatter", "alltoall", "scan", "exscan"),
)


class Staged(ScheduleExecutor):
    """Executor of collectives of private arrays, copied through two slots of shared memory."""

    name, summary = STAGED, "every rank copies its data into shared memory, where others read it"
    memory = "slots"
    turns = 2

    def __init__(self, host: Host):
        super().__init__(host)
        self._reason: str | None = None
        self.ready = host.heap is None
        self._shipped = {collective: find(collective, "slots") for collective in _SHIPPED}
        self._one_shot = {c: find(c, "slots_one_shot") for c in ("allreduce", "reduce")}

    def schedules(self, collective: str) -> list[Choice]:
        """Return the one of the collective, and the one for its short arrays if there is one."""
        return [each[collective] for each in (self._shipped, self._one_shot) if collective in each]

    def refuses(self, call: Call, background: bool) -> str | None:
        if self._reason is not None:
            return self._reason
        if background:
            return "it cannot run in the background"
        if call.collective not in self._shipped:
            return f"there is no {call.collective} through slots"
        if call.uneven_alltoall:
            return UNEVEN
        if call.nbytes <= STAGING_BYTES:
            return None
        if call.op is None and call.nbytes > _MOST_MOVED:
            most = f"{_MOST_MOVED >> 20} MiB, beyond which binding takes longer than slots save"
            return f"its {call.nbytes} bytes exceed {most}; algorithm='slots' runs it"
        return self.lacks(self.plan(call, self._choice(call)), call, background)

    def lacks(self, plan: Plan, call: Call, background: bool) -> str | None:
        if self._reason is not None or background:
            return self._reason or "it cannot run in the background"
        nbytes = _slot_bytes(plan, call)
        if nbytes > STAGING_BYTES:
            return f"it needs {nbytes} bytes of a staging slot, which has {STAGING_BYTES >> 20} MiB"
        return None

    def plan(self, call: Call, choice: Choice) -> Plan:
        """Return the plan of a schedule, with as many pieces as make each fit into a slot."""
        count, largest = choice.algorithm.block_count(call.size), longest_block(call, choice)
        pieces = self._host.pipelining.of(choice.algorithm, call.size, 1, count, largest)[0]

        def fits(plan: Plan) -> bool:
            return call.nbytes <= STAGING_BYTES or _slot_bytes(plan, call) <= STAGING_BYTES

        return self._plans.fitting(call, choice, pieces, fits)

    def make_ready(self) -> None:
        assert self.heap is not None
        try:
            self.heap.make_staging()
        except (MemoryError, Unsupported) as error:
            self._reason = str(error)
        self.ready = True

    def agreed(self, call: Call, choice: Choice | None) -> str:
        # Ranks with different executors would hang.
        return self.name if choice is None else f"by {choice.name} through slots"

    def kind(self, call: Call) -> Hashable:
        by = call.op
        if call.nbytes > _MAX_SHARED_BYTES or not (by is None or by.builtin or by.grouping != ANY):
            return None
        op = None if by is None else (by.name, by.grouping)
        input_size = -1 if call.x is None else call.x.size
        output_size = -1 if call.out is None else call.out.size
        return call.collective, call.dtype, call.root, op, call.counts, input_size, output_size

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        plan = self.plan(call, self._choice(call) if choice is None else choice)
        return self.program(call, plan, use, slot=use.turn)

    def _choice(self, call: Call) -> Choice:
        """Return the schedule by which a call is served that names none."""
        collective = call.collective
        fits = call.nbytes <= STAGING_BYTES  # in one shot there are no pieces
        short = fits and collective in self._one_shot and one_shot(call)
        return (self._one_shot if short else self._shipped)[collective]

    def binding(self, plan: Plan, call: Call, bank: list[int], turn: int = 0) -> Binding:
        """Return a plan bound to the arrays of a call, and to slot number `turn` of all ranks."""
        heap = self.heap
        assert heap is not None
        layout, dtype, at, slot = plan.layout(call), call.dtype, plan.at, heap.slot(turn)
        arrays: dict[Any, Any] = {}
        for scratch in layout.scratch:
            arrays[scratch] = np.empty(scratch.size, dtype)
        for key, count in layout.lengths.items():
            owner, kind = key
            if kind in layout.starts:
                start = slot.address(at[owner]) + layout.starts[kind] * dtype.itemsize
                arrays[key] = view_at(start, count, dtype)
            else:
                arrays[key] = unowned(call.x if kind == "in" else call.out)
        return Binding(call, layout, heap, bank, arrays, [], in_place=call.in_place)


def _slot_bytes(plan: Plan, call: Call) -> int:
    return plan.layout(call).slot_elements * call.dtype.itemsize
