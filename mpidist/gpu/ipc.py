"""The ``ipc`` executor: it runs schedules in the symmetric memory of the GPUs of a node.

A step is a copy, or a kernel that combines several arrays; both are queued on the arrays' stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from ..backends.executor import ONCE, Use
from ..backends.program import Program, library_call
from ..calls.call import Call
from ..device.array import DeviceArray
from ..engine.layout import ARGUMENT, Plan, Plans
from ..engine.schedules import UNEVEN
from ..engine.service import Service
from ..operations import is_mean
from ..schedule.registry import Choice, find
from ..selection.names import IPC
from .executor import GpuExecutor
from .heap import DeviceHeap, DeviceLocation

NEEDS = {"allreduce": "out", "broadcast": "out", "allgather": "out", "reduce_scatter": "x"}
"""The argument of each collective whose array must be symmetric, on every rank."""
_WORD = 4  # bytes
_COUNT_LIMIT = 1 << 32


def why_not(call: Call, heap: DeviceHeap, needs: Iterable[str] | None = None) -> str | None:
    """Return why a call cannot be served in symmetric memory of GPUs, or None if it can.

    `needs` are the arguments that must be symmetric; by default that of :data:`NEEDS`.
    """
    if needs is None and call.collective not in NEEDS:
        return f"there is no {call.collective} in symmetric memory of GPUs"
    for need in [NEEDS[call.collective]] if needs is None else needs:
        if heap.find(getattr(call, need)) is None:
            return f"{need} was not allocated by comm.empty(device=...)"
    if call.op is not None and not call.op.builtin:
        return "a Python function cannot run on a device"
    if call.op is not None and not heap.device.combines(call.dtype):
        return f"the device has no arithmetic for {call.dtype}"
    return None


class Ipc(GpuExecutor):
    """Executor of schedules in symmetric memory of GPUs, on the arrays' streams.

    A call queues its copies, and one kernel for each combination, with a barrier of the ranks'
    streams at each meeting.  The barriers are counters in symmetric memory that the streams write
    and wait for.

    Before anything is queued the ranks meet on the host, within the deadline, so a missing rank is
    named.  If a rank dies afterwards, the streams of the others wait until the job ends.  No kernel
    spins, so ranks may share a GPU.  Results have the bits of "direct" on the host, but for complex
    products, and the sign of a zero among the largest or smallest.
    """

    name, summary = IPC, "kernels and copies in the symmetric memory of the GPUs"
    memory = "mapped"

    def __init__(self, unavailable: str | None, heap: DeviceHeap, service: Service):
        super().__init__(unavailable)
        self._heap, self._device = heap, heap.device
        self._plans = Plans([range(heap.size)], service.arity, service.pipelining)
        self._shipped = {collective: find(collective, "in_place") for collective in NEEDS}
        self._count = 0
        self._last_stream: int | None = None
        self._event = self._device.event()

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        """Return why the call cannot be served, usually a private array."""
        if self.unavailable is not None:
            return self.unavailable
        if background:
            return "in the background there is no meeting, after which it can be queued"
        if not isinstance(algorithm, Choice):
            return why_not(call, self._heap)
        if call.uneven_alltoall:
            return UNEVEN
        plan = self._plans.find(call, algorithm)
        if plan.mixed or "groups" in algorithm.algorithm.uses:
            return "it sends messages, too"
        for buffer in (*plan.noted, *plan.scratch):
            return f"others reach its {buffer!r}, which is not at one location on all ranks"
        if plan.layout(call).scratch:
            return "it needs scratch memory"
        if call.op is not None and is_mean(call.op) and not plan.phases.complete:
            return "it combines in several steps, and a kernel divides each result for a mean"
        return why_not(call, self._heap, plan.needs)

    def depends_on(self, call: Call) -> bool:
        """Return whether the array is symmetric that must be."""
        need = NEEDS.get(call.collective)
        return need is not None and self._heap.find(getattr(call, need)) is not None

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the text that all ranks compare, with the symmetric arrays' locations."""
        needs, text = [NEEDS.get(call.collective, "")], "in symmetric memory of GPUs"
        if choice is not None:
            needs, text = self._plans.find(call, choice).needs, f"by {choice.name} {text}"
        for need in needs:
            text += f" {self._heap.key(getattr(call, need))}"
        return text

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        """Return a program that queues the call on a stream, once all ranks have arrived."""
        plan = self._plans.find(call, choice or self._shipped[call.collective])
        return library_call(partial(self.serve, call, plan))

    def serve(self, call: Call, plan: Plan) -> None:
        """Queue a call on the stream of its result; every rank must have begun the call."""
        data = [a for a in (call.out, call.x) if isinstance(a, DeviceArray)]
        stream = data[0].stream
        for other in {a.stream for a in data[1:]} | {self._last_stream} - {None, stream}:
            assert other is not None
            self._event.record(other)  # barriers of one communicator follow each other
            self._event.block(stream)
        self._queue(call, plan, stream)
        for other in {a.stream for a in data[1:]} - {stream}:
            self._event.record(stream)
            self._event.block(other)
        self._last_stream = stream

    def _queue(self, call: Call, plan: Plan, stream: int) -> None:
        """Queue the steps of a call, with a barrier at each meeting."""
        layout, awaits, item = plan.layout(call), plan.phases.awaits, call.dtype.itemsize
        at: dict[Any, int] = {}
        places: dict[str, DeviceLocation | None] = {}
        for need in plan.needs:
            places[need] = self._heap.find(getattr(call, need))
        for key in layout.lengths:  # an input that is copied to the result is read there
            owner, buffer = key
            need = "out" if plan.may_copy else ARGUMENT[buffer]
            location = None if owner == call.rank else places[need]
            if location is None:
                at[key] = getattr(call, need).pointer
            else:
                at[key] = location.allocation.pointers[owner] + location.offset
        if plan.may_copy:
            self._copy(call.out.pointer, call.x.pointer, call.x.nbytes, stream)
        divisor = call.size if call.op is not None and is_mean(call.op) else 1
        for number, steps in enumerate(layout.steps):
            if 0 < number <= len(awaits):
                self._barrier(awaits[number - 1], stream)
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

    def _barrier(self, awaits: Iterable[int], stream: int) -> None:
        """Queue this rank's arrival, which all others see, and the wait for those of `awaits`."""
        self._count = count = (self._count + 1) % _COUNT_LIMIT
        flags, rank = self._heap.flags, self._heap.rank
        assert flags is not None
        for peer, pointer in enumerate(flags.pointers):
            if peer != rank:
                self._device.write_word(pointer + rank * _WORD, count, stream)
        for peer in awaits:
            self._device.wait_word(flags.pointers[rank] + peer * _WORD, count, stream)
