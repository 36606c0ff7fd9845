"""The executors ``ipc`` and ``ipc_slots``: they run schedules in memory that a node's GPUs share.

A step is a copy, or a kernel that combines several arrays; both are queued on the arrays' stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from ..backends.executor import ONCE, Use
from ..backends.program import Program, library_call
from ..calls.call import Call
from ..device.array import DeviceArray
from ..device.recognise import as_device_array
from ..engine.layout import ARGUMENT, Plan, Plans
from ..engine.schedules import UNEVEN
from ..engine.service import Service
from ..errors import Unsupported
from ..operations import is_mean
from ..schedule.registry import Choice, find
from ..selection.names import IPC, IPC_SLOTS
from .completion import Completion
from .executor import GpuExecutor
from .heap import SLOT_BYTES, DeviceHeap

NEEDS = {"allreduce": "out", "broadcast": "out", "allgather": "out", "reduce_scatter": "x"}
"""The argument of each collective whose array must be symmetric for "ipc", on every rank."""
SLOTS = (
    *("allreduce", "reduce", "reduce_scatter", "allgather"),
    *("broadcast", "gather", "scatter", "alltoall", "scan", "exscan"),
)
"""The collectives of "ipc_slots"."""


def is_symmetric(call: Call, heap: DeviceHeap) -> bool:
    """Return whether the array is in symmetric memory that must be for "ipc"."""
    need = NEEDS.get(call.collective)
    return need is not None and heap.find(getattr(call, need)) is not None


class IpcExecutor(GpuExecutor):
    """Base class of executors of schedules in memory that GPUs share, on the arrays' streams.

    A call queues its copies, and one kernel for each combination, with a barrier of the ranks'
    streams at each meeting.  The barriers are counters in symmetric memory that the streams write
    and wait for.

    Before anything is queued the ranks meet on the host, within the deadline, so a missing rank is
    named.  If a rank dies afterwards, the streams of the others wait until the job ends; where the
    others are to go on, each call waits on the host until it is complete.  No kernel spins, so
    ranks may share a GPU.  Results have the bits of the same schedule on the host, but
    for complex products, and the sign of a zero among the largest or smallest.
    """

    def __init__(self, unavailable: str | None, heap: DeviceHeap, service: Service):
        super().__init__(unavailable)
        self._heap, self._device = heap, heap.device
        self._completion = Completion(service, heap.let_go)
        self._plans = Plans([range(heap.size)], service.arity, service.pipelining)
        self._event = self._device.event()

    def refuses(self, call: Call) -> str | None:
        """Return why the shipped schedule cannot serve a call, or None."""
        raise NotImplementedError

    def lacks(self, plan: Plan, call: Call) -> str | None:
        """Return why a schedule does not reach the buffers of a call, or None if it does."""
        raise NotImplementedError

    def plan(self, call: Call, choice: Choice | None) -> Plan:
        """Return the plan of the schedule that a call names, or of the shipped one."""
        raise NotImplementedError

    def places(self, call: Call, plan: Plan) -> dict[Any, int]:
        """Return the address of each array of a plan's layout, by what stands for it."""
        raise NotImplementedError

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        """Return why the call cannot be served."""
        if self.unavailable is not None:
            return self.unavailable
        if background:
            return "in the background there is no meeting, after which it can be queued"
        if call.op is not None and not call.op.builtin:
            return "a Python function cannot run on a device"
        if call.op is not None and not self._device.combines(call.dtype):
            return f"the device has no arithmetic for {call.dtype}"
        if not isinstance(algorithm, Choice):
            return self.refuses(call)
        if call.uneven_alltoall:
            return UNEVEN
        plan = self.plan(call, algorithm)
        if plan.mixed or "groups" in algorithm.algorithm.uses:
            return "it sends messages, too"
        if call.op is not None and is_mean(call.op) and not plan.phases.complete:
            return "it combines in several steps, and a kernel divides each result for a mean"
        return self.lacks(plan, call)

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        """Return a program that queues the call on a stream, once all ranks have arrived."""
        return library_call(partial(self.serve, call, self.plan(call, choice)))

    def serve(self, call: Call, plan: Plan) -> int:
        """Queue a call on the stream of its result, which is returned; all ranks have begun it."""
        data = [a for a in (call.out, call.x) if isinstance(a, DeviceArray)]
        stream, last = data[0].stream, self._heap.last
        others = {a.stream for a in data[1:]} - {stream}
        for other in others:
            self._event.record(other)
            self._event.block(stream)
        last.block(stream)  # barriers of one communicator follow each other
        self._queue(call, plan, stream)
        last.record(stream)
        for other in others:
            last.block(other)
        self._completion.wait(call, last)
        return stream

    def _queue(self, call: Call, plan: Plan, stream: int) -> None:
        """Queue the steps of a call, with a barrier at each meeting."""
        layout, awaits, item = plan.layout(call), plan.phases.awaits, call.dtype.itemsize
        at = self.places(call, plan)
        if plan.may_copy:
            self._copy(call.out.pointer, call.x.pointer, call.x.nbytes, stream)
        divisor = call.size if call.op is not None and is_mean(call.op) else 1
        for number, steps in enumerate(layout.steps):
            if 0 < number <= len(awaits):
                self._heap.barrier(awaits[number - 1], stream)
            for ranks, sources, targets in steps:
                inputs = [at[key] + start * item for key, start, _ in sources]
                outs = [at[key] + start * item for key, start, _ in targets]
                count = sources[0][2] - sources[0][1]
                if ranks:
                    assert call.op is not None
                    how = count, divisor, stream
                    self._device.combine(call.op.name, call.dtype, inputs, outs, *how)
                else:
                    for out in outs:
                        self._copy(out, inputs[0], count * item, stream)
        for (to, start, stop), (key, source, _) in layout.finish:
            nbytes = (stop - start) * item
            self._copy(at[to] + start * item, at[key] + source * item, nbytes, stream)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes and target != source:
            self._device.copy(target, source, nbytes, stream)


class Ipc(IpcExecutor):
    """Executor of collectives of symmetric arrays on GPUs, where they are."""

    name, summary = IPC, "kernels and copies in the symmetric memory of the GPUs"
    memory = "mapped"

    def __init__(self, unavailable: str | None, heap: DeviceHeap, service: Service):
        super().__init__(unavailable, heap, service)
        self._shipped = {collective: find(collective, "in_place") for collective in NEEDS}

    def refuses(self, call: Call) -> str | None:
        if call.collective not in NEEDS:
            return f"there is no {call.collective} in symmetric memory of GPUs"
        return self._private(call, [NEEDS[call.collective]])

    def lacks(self, plan: Plan, call: Call) -> str | None:
        for buffer in (*plan.noted, *plan.scratch):
            return f"others reach its {buffer!r}, which is not at one location on all ranks"
        if plan.layout(call).scratch:
            return "it needs scratch memory"
        return self._private(call, plan.needs)

    def _private(self, call: Call, needs: Iterable[str]) -> str | None:
        for need in needs:
            if self._heap.find(getattr(call, need)) is None:
                return f"{need} was not allocated by comm.empty(device=...)"
        return None

    def plan(self, call: Call, choice: Choice | None) -> Plan:
        return self._plans.find(call, choice or self._shipped[call.collective])

    def depends_on(self, call: Call) -> bool:
        """Return whether the array is symmetric that must be."""
        return is_symmetric(call, self._heap)

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the text that all ranks compare, with the symmetric arrays' locations."""
        needs, text = [NEEDS.get(call.collective, "")], "in symmetric memory of GPUs"
        if choice is not None:
            needs, text = self.plan(call, choice).needs, f"by {choice.name} {text}"
        for need in needs:
            text += f" {self._heap.key(getattr(call, need))}"
        return text

    def places(self, call: Call, plan: Plan) -> dict[Any, int]:
        found = {need: self._heap.find(getattr(call, need)) for need in plan.needs}
        at = {}
        for key in plan.layout(call).lengths:  # an input copied to the result is read there
            owner, buffer = key
            need = "out" if plan.may_copy else ARGUMENT[buffer]
            location = None if owner == call.rank else found[need]
            if location is None:
                at[key] = getattr(call, need).pointer
            else:
                at[key] = location.allocation.pointers[owner] + location.offset
        return at


class IpcSlots(IpcExecutor):
    """Executor of collectives of private arrays on GPUs, copied through two slots of each rank.

    The slots take turns from one of its calls to the next.  The streams of all ranks have met in
    the call between two that use one slot, so nothing is still read there.
    """

    name, summary = IPC_SLOTS, "through slots in memory that the GPUs share"
    memory = "slots"

    def __init__(self, unavailable: str | None, heap: DeviceHeap, service: Service):
        super().__init__(unavailable, heap, service)
        self.ready = unavailable is not None
        self._turn = 0
        self._scratch: list[DeviceArray] = []  # the last is the longest; calls use the others still
        self._shipped = {collective: find(collective, "slots") for collective in SLOTS}

    def make_ready(self) -> None:
        """Allocate the slots; collective."""
        try:
            self._heap.make_slots()
        except Unsupported as error:
            self.unavailable = str(error)
        self.ready = True

    def refuses(self, call: Call) -> str | None:
        if call.collective not in SLOTS:
            return f"there is no {call.collective} through slots of GPUs"
        return UNEVEN if call.uneven_alltoall else self.lacks(self.plan(call, None), call)

    def lacks(self, plan: Plan, call: Call) -> str | None:
        if _slot_bytes(plan, call) > SLOT_BYTES:
            return f"it needs more than a slot, which has {SLOT_BYTES >> 20} MiB"
        return None

    def plan(self, call: Call, choice: Choice | None) -> Plan:
        """Return the plan with as few pieces as fit into a slot."""
        choice = choice or self._shipped[call.collective]
        return self._plans.fitting(
            call, choice, 1, lambda plan: _slot_bytes(plan, call) <= SLOT_BYTES
        )

    def agreed(self, call: Call, choice: Choice | None) -> str:
        return f"by {choice.name} through slots" if choice else self.name

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        """Return the program; a rank without scratch memory raises before the others depend on it.

        The memory is kept: its uses follow each other, as calls do.
        """
        plan = self.plan(call, choice)
        nbytes = sum(made.size for made in plan.layout(call).scratch) * call.dtype.itemsize
        if nbytes and (not self._scratch or self._scratch[-1].nbytes < nbytes):
            made = self._device.empty((1 << (nbytes - 1).bit_length(),), np.dtype(np.uint8))
            self._scratch.append(as_device_array(made, call.rank))
            self._event.record(self._scratch[-1].stream)  # on which it may have been freed just now
            self._event.block((call.x if call.out is None else call.out).stream)
        return library_call(partial(self.serve, call, plan))

    def _queue(self, call: Call, plan: Plan, stream: int) -> None:
        if not plan.phases.meets_all:  # but only some ranks, as a schedule of the user's may
            self._heap.barrier([r for r in range(call.size) if r != call.rank], stream)
        super()._queue(call, plan, stream)

    def places(self, call: Call, plan: Plan) -> dict[Any, int]:
        layout, item, slots = plan.layout(call), call.dtype.itemsize, self._heap.slots(self._turn)
        self._turn = 1 - self._turn
        at: dict[Any, int] = {}
        free = self._scratch[-1].pointer if self._scratch else 0
        for scratch in layout.scratch:
            at[scratch] = free
            free += scratch.size * item
        for key in layout.lengths:
            owner, kind = key
            if kind in layout.starts:
                at[key] = slots[owner] + layout.starts[kind] * item
            else:
                at[key] = getattr(call, ARGUMENT[kind]).pointer
        return at


def _slot_bytes(plan: Plan, call: Call) -> int:
    return plan.layout(call).slot_elements * call.dtype.itemsize
