"""Executors that run schedules in a memory that the ranks of a node share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..backends.executor import ONCE, Executor, Use
from ..backends.program import Action, Program
from ..calls.call import Call
from ..operations import divides_first, find_op
from ..schedule.registry import Choice
from ..shared_memory.barrier import BoardArrival
from ..shared_memory.compiled import described_pace
from ..shared_memory.host import Host
from ..shared_memory.kernel import unowned
from .layout import Plan, Plans
from .one_sided import Binding
from .storage import HostMemory

UNEVEN = "the counts of the other ranks are unknown (uneven alltoall)"


class ScheduleExecutor(Executor):
    """Base class of executors that run schedules in one of the memories.

    A schedule is laid out once for each length of its arrays, and then bound to many.  Subclasses
    say which schedules serve a call, and how their buffers are reached.
    """

    def __init__(self, host: Host):
        self._host = host
        self.heap = host.heap  # None if the ranks of the node share no memory
        self.apart = host.apart  # why it does not have all ranks; None if it does
        self._plans = Plans(host.groups, host.arity, host.pipelining)

    def refuses(self, call: Call, background: bool) -> str | None:
        """Return why the shipped schedules cannot serve a call on one node, or None."""
        raise NotImplementedError

    def lacks(self, plan: Plan, call: Call, background: bool) -> str | None:
        """Return why a schedule does not reach the buffers of a call, or None if it does."""
        raise NotImplementedError

    def binding(self, plan: Plan, call: Call, bank: list[int], turn: int = 0) -> Binding:
        """Return a plan bound to a call; `bank` is ``Program.bank``, `turn` that of a `Use`."""
        raise NotImplementedError

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        """Return why a call cannot be served, by a schedule or by those shipped for its memory."""
        if self.heap is None:
            return self.apart
        if not isinstance(algorithm, Choice):
            return self.apart or self.refuses(call, background)
        if call.uneven_alltoall:
            return UNEVEN
        return self.lacks(self.plan(call, algorithm), call, background)

    def described(self) -> str:
        return self.summary + ("" if self.memory == "published" else described_pace())

    def plan(self, call: Call, choice: Choice) -> Plan:
        """Return the plan of a schedule for the ranks and the root of a call."""
        return self._plans.find(call, choice)

    def program(self, call: Call, plan: Plan, use: Use = ONCE, slot: int | None = None) -> Program:
        """Bind a call to a schedule: return its new program."""
        bank = [0]
        first: list[Action] = []
        # A Fold of all ranks divides its operands itself; sums of some of them may overflow.
        if not plan.phases.complete and divides_first(call.op, call.dtype):
            call = _divided(call, first)
        binding = self.binding(plan, call, bank, use.turn)
        binding.before[:0] = first
        if not (use.background or plan.mixed):
            return binding.kernel(slot)
        return binding.program(self._host.backend, self.arrival(bank), use.persistent, slot)

    def arrival(self, bank: list[int]) -> BoardArrival:
        """Return the arrival of all ranks of the node at a call."""
        backend = self._host.backend
        return BoardArrival(backend.board, self._host.check_same, bank, backend.patience)


def _divided(call: Call, first: list[Action]) -> Call:
    """Return the sum in place of a mean, of inputs that an action added to `first` divides."""
    assert call.x is not None
    x, inside = call.x, call.collective == "allreduce"
    divided = call.out if inside else np.empty(x.size, call.dtype)
    first.append(HostMemory.divide(unowned(x), unowned(call.out) if inside else divided, call.size))
    assert call.op is not None
    op = replace(find_op("sum"), grouping=call.op.grouping)
    return replace(call, x=divided, op=op, in_place=inside)
