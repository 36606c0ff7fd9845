"""Collectives of arrays on GPUs by NCCL: what it serves, on which stream, and by what deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ...backends.program import Program, library_call
from ...calls.call import Call
from ...calls.prepare import apart
from ...device.array import DeviceArray
from ...device.base import InFlight
from ...engine.service import Service
from ...engine.work import Work
from ...errors import UnsupportedDtype
from ...operations import loses_nan
from ...schedule.registry import Choice
from ..executor import LIBRARIES, GpuExecutor
from ..ipc import Arena
from ..ipc import why_not as why_not_symmetric
from .backend import NcclBackend, Ranks, type_of
from .watch import Watch

NATIVE = ("allreduce", "reduce", "reduce_scatter", "broadcast", "allgather")
"""Collectives of NCCL's own; the others are messages that are under way together."""


def why_not(call: Call) -> str | None:
    """Say why NCCL does not serve a call, the same on every rank, or give None."""
    if call.op is not None:
        if not call.op.builtin:
            return "NCCL calls no function of Python"
        if loses_nan(call.op, call.dtype):
            return f"NCCL does not say what the {call.op.name} of NaN is"
        try:
            type_of(call.dtype, call.op.name, call.rank)
        except UnsupportedDtype as error:
            return str(error)
    if call.collective == "reduce_scatter" and len(set(call.counts)) > 1:
        return "NCCL wants parts of one length"
    return None


class NcclPath:
    """NCCL for one communicator; made by all ranks together.

    Calls are queued and return; what is queued on the arrays' streams afterwards sees the result.
    One follows another, on whatever streams they are.

    Parameters
    ----------
    backend : NcclBackend
        Over the ranks.
    broke : callable
        ``broke(reason)`` is told when NCCL was aborted.
    """

    def __init__(self, backend: NcclBackend, broke: Callable[[str], object]):
        self.backend, self.device = backend, backend.device
        self._mark, self._last = self.device.event(), None  # type: Any, int | None
        self._beside: int | None = None
        self._scratch = InFlight()
        self.watch = Watch(backend, broke)

    def serve(
        self,
        call: Call,
        timeout: float | None,
        queue: Callable[[Call, int], list[Any]] | None = None,
    ) -> None:
        """Queue a call on the stream of its arrays; another way of queueing it may be given."""
        arrays = _arrays(call)
        stream = arrays[0].stream
        self._follow(arrays, stream)
        made = (queue or self._queue)(apart(call, stream), stream)
        self._lead(stream, {a.stream for a in arrays})
        event = self._watch(call, stream, timeout)
        if made:
            self._scratch.hold(event, [made, *arrays])

    def begin(self, call: Call, give: Callable[[], Any], timeout: float | None) -> Work:
        """Queue a call on a stream beside the others; its Work is an event.

        ``wait()`` has the arrays' streams wait for it, and the host not.
        """
        arrays = _arrays(call)
        if self._beside is None:
            self._beside = self.device.new_stream()
        beside = self._beside
        self._follow(arrays, beside)
        made = self._queue(apart(call, beside), beside)
        event = self._watch(call, beside, timeout)
        self._scratch.hold(event, [made, *arrays])

        def end() -> Any:
            for stream in {a.stream for a in arrays}:
                event.block(stream)
            return give()

        return Work(event.done, lambda look, timeout: None, end)

    def close(self) -> None:
        """Wait for what is queued, by its deadline, and destroy; collective."""
        self.watch.finish()
        self.backend.close()

    # -- order ----------------------------------------------------------------------------------

    def _follow(self, arrays: list[DeviceArray], stream: int) -> None:
        """Have a stream wait for what is queued: also where scratch memory was used last."""
        before = {self._last, self.device.current_stream(), *(a.stream for a in arrays)}
        for other in before - {None, stream}:
            assert other is not None
            self._mark.record(other)
            self._mark.block(stream)
        self._last = stream

    def _lead(self, stream: int, after: set[int]) -> None:
        for other in after - {stream}:
            self._mark.record(stream)
            self._mark.block(other)

    def _watch(self, call: Call, stream: int, timeout: float | None) -> Any:
        event = self.device.event()
        event.record(stream)
        end = None if timeout is None else time.monotonic() + timeout
        self.watch.add(event, end, call.fingerprint)
        return event

    # -- calls ----------------------------------------------------------------------------------

    def _queue(self, call: Call, stream: int) -> list[Any]:
        """Queue a call; give the memory that must outlive it."""
        x, out = (None if a is None else replace(a, stream=stream) for a in (call.x, call.out))
        name = call.collective
        even = len(set(call.counts)) <= 1
        if name in NATIVE and even:
            if max((a.size for a in (x, out) if a is not None), default=0):
                getattr(self, f"_{name}")(call, x, out)
        else:
            return self._messages(call, x, out, stream)
        return []

    def _allreduce(self, call: Call, x: Any, out: Any) -> None:
        assert call.op is not None
        self.backend.allreduce(x, out, call.op.name)

    def _reduce(self, call: Call, x: Any, out: Any) -> None:
        assert call.op is not None
        self.backend.reduce(x, out, call.op.name, call.root)

    def _reduce_scatter(self, call: Call, x: Any, out: Any) -> None:
        assert call.op is not None
        self.backend.reduce_scatter(x, out, call.op.name)

    def _broadcast(self, call: Call, x: Any, out: Any) -> None:
        self.backend.broadcast(x if call.rank == call.root else None, out, call.root)

    def _allgather(self, call: Call, x: Any, out: Any) -> None:
        self.backend.all_gather(x, out)

    def _messages(self, call: Call, x: Any, out: Any, stream: int) -> list[Any]:
        """Exchange parts: everyone's own is copied, the others are one group of messages."""
        sends, gets = _parts(call, x, out)
        mine, there = sends.pop(call.rank, None), gets.pop(call.rank, None)
        if mine is not None and there is not None and mine.pointer != there.pointer:
            self.device.copy(there.pointer, mine.pointer, mine.nbytes, stream)
        if sends or gets:
            with self.backend.group():
                for peer, part in sends.items():
                    self.backend.send(part, peer, stream)
                for peer, part in gets.items():
                    self.backend.recv(part, peer, stream)
        return [x]


class Nccl(GpuExecutor):
    """NCCL's communicator, made when it is first needed.

    Parameters
    ----------
    service : Service
        That is told if NCCL was aborted.
    everyone : callable
        ``everyone(value)`` gives the values of all ranks; collective.
    taken : dict
        The path of each collective of arrays in private memory.
    arena : Arena
        The symmetric memory.
    """

    name = "nccl"

    def __init__(
        self,
        service: Service,
        everyone: Callable[[Any], list[Any]],
        taken: dict[str, str],
        arena: Arena,
    ):
        self._service, self._everyone, self._taken, self._arena = service, everyone, taken, arena
        self._path: NcclPath | None = None

    @property
    def path(self) -> NcclPath:
        """What queues calls; made by all ranks, before the first call that it serves."""
        if self._path is None:
            backend = self._service.backend
            ranks = Ranks(backend.rank, backend.size, self._everyone)
            self._path = NcclPath(NcclBackend(ranks), self._broke)
        return self._path

    def _broke(self, reason: str) -> None:
        self._service.broken = f"{reason}; create a new communicator"

    def takes(self, call: Call, algorithm: str, background: bool) -> bool:
        """Return whether NCCL was agreed on; what lies in symmetric memory is left to its path."""
        if self._taken[call.collective] != self.name or algorithm not in LIBRARIES:
            return False
        if not background or algorithm != "auto":
            return True
        return why_not_symmetric(call, self._arena) is not None

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return what NCCL cannot do."""
        return why_not(call)

    def make_ready(self) -> None:
        """Start NCCL: the calls that this takes must not come within another."""
        assert self.path is not None

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the name of the path."""
        return "by NCCL"

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Return the program that queues the call, on its arrays' stream or on one beside."""
        path, timeout = self.path, self._service.timeout
        program = library_call(lambda: path.serve(call, timeout))
        program.begin = lambda give: path.begin(call, give, timeout)
        return program

    def close(self) -> None:
        """End NCCL, if it was started; collective."""
        if self._path is not None:
            self._path.close()


def _arrays(call: Call) -> list[DeviceArray]:
    return [a for a in (call.out, call.x) if isinstance(a, DeviceArray)]


def _cut(array: DeviceArray, counts: Any) -> dict[int, DeviceArray]:
    """Give the part of each rank, those without elements left out."""
    starts = [0, *accumulate(counts)]
    return {r: array.part(starts[r], starts[r] + n) for r, n in enumerate(counts) if n}


def _parts(call: Call, x: Any, out: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Give what this rank sends to each other, and where it receives what each sends."""
    name, everyone = call.collective, range(call.size)
    sends: dict[int, Any] = {}
    gets: dict[int, Any] = {}
    if name in ("alltoall", "scatter") and x is not None:
        sends = _cut(x, call.counts)
    elif name == "allgather" and x.size:
        sends = dict.fromkeys(everyone, x)
    elif name == "gather" and x.size:
        sends = {call.root: x}
    if name == "alltoall":
        gets = _cut(out, call.out_counts)
    elif name in ("allgather", "gather") and out is not None:
        gets = _cut(out, call.counts)
    elif name == "scatter" and out.size:
        gets = {call.root: out}
    return sends, gets
