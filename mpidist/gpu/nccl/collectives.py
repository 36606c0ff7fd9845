"""Collectives by NCCL: the calls that it serves, their streams and deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ...backends.program import Action
from ...calls.call import Call
from ...calls.prepare import with_copied_input
from ...device.array import DeviceArray
from ...device.base import Event, InFlight
from ...errors import CommunicationError, UnsupportedDtype
from ...operations import loses_nan
from ..completion import Completion
from .backend import NcclBackend, type_of
from .watch import NcclWatch, Queued

NATIVE = ("allreduce", "reduce", "reduce_scatter", "broadcast", "allgather")
"""Collectives that NCCL has; the others that only move data are groups of NCCL messages."""


def why_not(call: Call) -> str | None:
    """Return why NCCL cannot serve a call, or None if it can; the same on every rank."""
    if call.op is not None:
        if call.collective not in NATIVE:
            return f"NCCL has no {call.collective}"
        if not call.op.builtin:
            return "NCCL cannot call a Python function"
        if loses_nan(call.op, call.dtype):
            return f"NCCL does not say what the {call.op.name} of NaN is"
        try:
            type_of(call.dtype, call.op.name, call.rank)
        except UnsupportedDtype as error:
            return str(error)
    if call.collective == "reduce_scatter" and len(set(call.counts)) > 1:
        return "NCCL needs parts of equal length"
    return None


class NcclQueue:
    """The queue of NCCL calls of one communicator; created collectively.

    Calls are queued and return at once; work queued later on the arrays' streams waits for them.
    The calls of a communicator run one after another, even if they are on different streams.

    ``broke(error, operation)`` breaks the communicator after NCCL was aborted, in any thread.
    """

    def __init__(
        self,
        backend: NcclBackend,
        broke: Callable[[CommunicationError, str], object],
        completion: Completion,
    ):
        self.backend, self.device, self._completion = backend, backend.device, completion
        self._event = self.device.event()
        self._last: Any = self.device.event()  # of the last call, whose stream may be gone by now
        self._side_stream: int | None = None
        self._scratch = InFlight()
        self.watch = NcclWatch(backend, broke)

    def serve(
        self,
        call: Call,
        timeout: float | None,
        queue: Callable[[Call, int], list[Any]] | None = None,
    ) -> None:
        """Queue a blocking call on a stream of its arrays; return at once.

        NCCL is aborted if the call takes longer than `timeout` seconds (None: no limit).

        ``queue(call, stream)`` queues it and returns the memory that must stay alive until it is
        complete.  By default NCCL's call for the collective is queued, or a group of messages.
        """
        arrays = _arrays(call)
        stream = arrays[0].stream
        self._wait_for_queued(arrays, stream)
        scratch = (queue or self._queue)(with_copied_input(call, stream), stream)
        self._let_wait(stream, {a.stream for a in arrays})
        event = self._watch(call, stream, timeout)
        if scratch:
            self._scratch.hold(event, [scratch, *arrays])
        self._completion.wait(call, event)

    def begin(
        self, call: Call, timeout: float | None, check: Action
    ) -> tuple[Callable[[], bool], Action]:
        """Queue a background call on a separate stream; return ``done()`` and ``end()``.

        ``end()`` makes the arrays' streams wait for the call, not the host.  NCCL is aborted if the
        call takes longer than `timeout` seconds (None: no limit), or ``check()`` raises, in any
        thread, because another rank has queued a different call.
        """
        arrays = _arrays(call)
        if self._side_stream is None:
            self._side_stream = self.device.new_stream()
        side = self._side_stream
        self._wait_for_queued(arrays, side)
        scratch = self._queue(with_copied_input(call, side), side)
        event = self._watch(call, side, timeout, check)
        self._scratch.hold(event, [scratch, *arrays])

        def end() -> None:
            self._completion.wait(call, event)
            for stream in {a.stream for a in arrays}:
                event.block(stream)

        return event.done, end

    def close(self) -> None:
        """Wait for the queued calls, each until its deadline, and destroy NCCL; collective."""
        self.watch.finish()
        self.backend.close()
        if self._side_stream is not None:
            self.device.release_stream(self._side_stream)
            self._side_stream = None

    # -- ordering of streams --------------------------------------------------------------------

    def _wait_for_queued(self, arrays: list[DeviceArray], stream: int) -> None:
        """Make `stream` wait for earlier work on the arrays, and for the last NCCL call."""
        # The current stream too: new scratch memory may have been freed there a moment ago, while
        # what used it is still queued.
        self._last.block(stream)
        for other in {self.device.current_stream(), *(a.stream for a in arrays)} - {stream}:
            self._event.record(other)
            self._event.block(stream)

    def _let_wait(self, stream: int, after: set[int]) -> None:
        for other in after - {stream}:
            self._event.record(stream)
            self._event.block(other)

    def _watch(
        self, call: Call, stream: int, timeout: float | None, check: Action | None = None
    ) -> Event:
        self._last = event = self.device.event()
        event.record(stream)
        end = None if timeout is None else time.monotonic() + timeout
        self.watch.add(Queued(event, end, call.signature, check))
        return event

    # -- calls ----------------------------------------------------------------------------------

    def _queue(self, call: Call, stream: int) -> list[Any]:
        """Queue a call; return the memory that must stay alive until the call is complete."""
        x, out = (None if a is None else replace(a, stream=stream) for a in (call.x, call.out))
        name = call.collective
        even = len(set(call.counts)) <= 1
        if name in NATIVE and even:
            if max((a.size for a in (x, out) if a is not None), default=0):
                self._native(call, x, out)
        else:
            return self._messages(call, x, out, stream)
        return []

    def _native(self, call: Call, x: Any, out: Any) -> None:
        backend, name, op = self.backend, call.collective, "" if call.op is None else call.op.name
        if name == "allreduce":
            backend.allreduce(x, out, op)
        elif name == "reduce":
            backend.reduce(x, out, op, call.root)
        elif name == "reduce_scatter":
            backend.reduce_scatter(x, out, op)
        elif name == "broadcast":
            backend.broadcast(x if call.rank == call.root else None, out, call.root)
        else:
            backend.all_gather(x, out)

    def _messages(self, call: Call, x: Any, out: Any, stream: int) -> list[Any]:
        """Queue a call as one group of messages, and a copy of this rank's own part.

        Returns the memory that must stay alive until the call is complete.
        """
        sends, receives = _parts(call, x, out)
        mine, target = sends.pop(call.rank, None), receives.pop(call.rank, None)
        if mine is not None and target is not None and mine.pointer != target.pointer:
            self.device.copy(target.pointer, mine.pointer, mine.nbytes, stream)
        if sends or receives:
            with self.backend.group():
                for peer, part in sends.items():
                    self.backend.send(part, peer, stream)
                for peer, part in receives.items():
                    self.backend.recv(part, peer, stream)
        return [x]


def _arrays(call: Call) -> list[DeviceArray]:
    return [a for a in (call.out, call.x) if isinstance(a, DeviceArray)]


def _split(array: DeviceArray, counts: Any) -> dict[int, DeviceArray]:
    """Return a dict from each rank to its part of an array, without empty parts."""
    starts = [0, *accumulate(counts)]
    return {r: array.part(starts[r], starts[r] + n) for r, n in enumerate(counts) if n}


def _parts(call: Call, x: Any, out: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the parts that this rank sends, by receiver, and its receive buffers, by sender."""
    name, everyone = call.collective, range(call.size)
    sends: dict[int, Any] = {}
    receives: dict[int, Any] = {}
    if name in ("alltoall", "scatter") and x is not None:
        sends = _split(x, call.counts)
    elif name == "allgather" and x.size:
        sends = dict.fromkeys(everyone, x)
    elif name == "gather" and x.size:
        sends = {call.root: x}
    if name == "alltoall":
        receives = _split(out, call.out_counts)
    elif name in ("allgather", "gather") and out is not None:
        receives = _split(out, call.counts)
    elif name == "scatter" and out.size:
        receives = {call.root: out}
    return sends, receives
