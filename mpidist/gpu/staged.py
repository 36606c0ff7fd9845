"""The fallback path: through pinned host memory, in chunks, overlapping copies and messages.

Chunk k is copied to a slot of host memory on one stream while the ranks exchange chunk k-1, and
chunk k-2 is copied back on a second stream.  Each slot has two events: its input has been copied
in, its result has been copied out.  The host waits only for the first; the caller's streams wait
for the last result, so that work queued there later sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..backends.executor import Executor
from ..backends.program import Program, Round
from ..calls.call import Call, Prepared
from ..device.array import DeviceArray
from ..device.base import Device, InFlight
from ..engine.service import Service
from ..engine.work import Work
from ..schedule.registry import Choice
from .chunks import Chunk, Extent, chunks, elements

_SHARED = ("allreduce", "reduce", "broadcast")  # result and input have the same length


def bytes_needed(call: Call, chunk: Chunk) -> int:
    """Return the bytes of host memory of a chunk; the input follows the result."""
    brings, gets = elements(chunk.brings), elements(chunk.gets)
    one = max(brings, gets) if call.collective in _SHARED else brings + gets
    return one * call.dtype.itemsize


def views(call: Call, chunk: Chunk, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the input and the result of a chunk, in host memory of :func:`bytes_needed` bytes."""
    size = call.dtype.itemsize
    brings, gets = elements(chunk.brings) * size, elements(chunk.gets) * size
    start = 0 if call.collective in _SHARED else gets
    return memory[start : start + brings].view(call.dtype), memory[:gets].view(call.dtype)


def hosted(call: Call, chunk: Chunk, x: np.ndarray, out: np.ndarray) -> Prepared:
    """Return the call of a chunk; its arguments were checked as those of the whole call."""
    source = None if call.x is None else x
    target = None if call.out is None else out
    in_place = call.collective in _SHARED and source is not None and target is not None
    part = replace(
        call,
        x=source,
        out=source if in_place else target,
        counts=chunk.counts,
        out_counts=chunk.out_counts,
        in_place=in_place,
        even=call.even if call.collective == "alltoall" else len(set(chunk.counts)) <= 1,
    )
    return Prepared(part, None)


@dataclass(slots=True)
class Landing(Prepared):
    """A prepared host call with its result on a GPU.

    Attributes
    ----------
    end : callable or None
        Queues the copies of the result to the GPU.
    target : callable or None
        Returns the user's array.
    """

    end: Callable[[], None] | None = None
    target: Callable[[], Any] | None = None

    @classmethod
    def of(cls, part: Prepared, end: Callable[[], None], target: Callable[[], Any]) -> Landing:
        """Return a host call with its result on a GPU."""
        return cls(
            part.call, part.result, part.staging, part.scalar, part.shown, end=end, target=target
        )

    def give(self) -> Any:
        """Queue the copies of the result, and return the user's array."""
        super(Landing, self).give()
        assert self.end is not None and self.target is not None
        self.end()
        return self.target()


CHUNK_BYTES = 4 << 20  # of a chunk's array
SLOTS = 3


class Slot:
    """Host memory for one chunk; it grows on demand and never shrinks.

    Attributes
    ----------
    filled, emptied : Event
        The input has been copied in; the result has been copied out, or is not needed any more.
    """

    def __init__(self, device: Device):
        self._device = device
        self._memory = np.empty(0, np.uint8)
        self.filled, self.emptied = device.event(), device.event()

    def memory(self, nbytes: int) -> np.ndarray:
        """Return at least `nbytes` of memory; waits until smaller memory is out of use."""
        if self._memory.nbytes < nbytes:
            self.emptied.synchronize()
            self._memory = self._device.pinned(nbytes)
        return self._memory

    def __del__(self) -> None:
        with suppress(Exception):  # the driver may have been shut down with the interpreter
            self.emptied.synchronize()


class Staged:
    """The staged path of one communicator: each chunk is an operation of the host.

    Parameters
    ----------
    service : Service
        The service of the communicator, for host arrays.
    device : Device
        Device of the arrays.
    chunk_bytes : int
        Bytes of an array's part in each chunk.
    """

    def __init__(self, service: Service, device: Device, chunk_bytes: int = CHUNK_BYTES):
        self._service, self.device, self.chunk_bytes = service, device, chunk_bytes
        self._slots = [Slot(device) for _ in range(SLOTS)]
        self._inward, self._outward = device.new_stream(), device.new_stream()
        self._ready = device.event()
        self._pending = InFlight()

    def by(self, algorithm: str) -> Executor:
        """Return the executor that serves the chunks by an algorithm."""
        return _StagedBy(self, algorithm)

    def serve(self, call: Call, algorithm: str) -> None:
        """Serve a call; work queued later on its streams sees the result."""
        streams = self._enter(call)
        parts = list(chunks(call, self.chunk_bytes))
        self._bring(call, parts[0], self._slots[0])
        for number, chunk in enumerate(parts):
            slot = self._slots[number % SLOTS]
            if number + 1 < len(parts):
                self._bring(call, parts[number + 1], self._slots[(number + 1) % SLOTS])
            slot.filled.synchronize()
            x, out = views(call, chunk, slot.memory(bytes_needed(call, chunk)))
            self._service.serve(hosted(call, chunk, x, out), algorithm)
            self._copy_back(call, chunk, out)
            slot.emptied.record(self._outward)
        self._leave(streams)

    def begin(self, call: Call, algorithm: str, give: Callable[[], Any]) -> Work:
        """Begin a call in the background, whose Work returns ``give()``.

        It goes in one piece: the ranks would begin several chunks in different orders, between the
        calls of their users.
        """
        streams = self._enter(call)
        (chunk,) = chunks(call, max(call.nbytes, self._bytes_of(call), 1) * call.size)
        memory = self.device.pinned(max(bytes_needed(call, chunk), 1))
        x, out = views(call, chunk, memory)
        self._copy(call.x, chunk.brings, x, self._inward, inward=True)
        self.device.synchronize(self._inward)

        def end() -> None:
            self._copy_back(call, chunk, out)
            gone = self.device.event()
            gone.record(self._outward)
            self._pending.hold(gone, memory)  # the copy reads it after this has returned
            self._leave(streams)

        part = Landing.of(hosted(call, chunk, x, out), end, give)
        return self._service.background.begin(part, algorithm)

    def _bytes_of(self, call: Call) -> int:
        arrays = [data for data in (call.x, call.out) if data is not None]
        return sum(data.nbytes for data in arrays)

    # -- ordering -------------------------------------------------------------------------------

    def _enter(self, call: Call) -> set[int]:
        """Make the copy streams wait for all work queued on the arrays' streams."""
        streams = {data.stream for data in (call.x, call.out) if isinstance(data, DeviceArray)}
        for stream in streams:
            self._ready.record(stream)
            self._ready.block(self._inward)
            self._ready.block(self._outward)
        return streams

    def _leave(self, streams: set[int]) -> None:
        """Make the arrays' streams wait for all results."""
        for ours in (self._inward, self._outward):
            self._ready.record(ours)
            for stream in streams:
                self._ready.block(stream)

    # -- copies ---------------------------------------------------------------------------------

    def _bring(self, call: Call, chunk: Chunk, slot: Slot) -> None:
        """Queue the copy of a chunk's input to a slot, once the slot is free."""
        slot.emptied.block(self._inward)
        x, _ = views(call, chunk, slot.memory(bytes_needed(call, chunk)))
        self._copy(call.x, chunk.brings, x, self._inward, inward=True)
        slot.filled.record(self._inward)

    def _copy_back(self, call: Call, chunk: Chunk, out: np.ndarray) -> None:
        self._copy(call.out, chunk.gets, out, self._outward, inward=False)

    def _copy(
        self, data: Any, extents: Sequence[Extent], host: np.ndarray, stream: int, inward: bool
    ) -> None:
        """Queue copies between parts of an array and as many elements of host memory."""
        if not isinstance(data, DeviceArray):
            return
        size = data.dtype.itemsize
        there = host.__array_interface__["data"][0]
        for start, stop in extents:
            here, nbytes = data.pointer + start * size, (stop - start) * size
            if nbytes:
                target, source = (there, here) if inward else (here, there)
                self.device.copy(target, source, nbytes, stream)
            there += nbytes


class _StagedBy(Executor):
    """The staged path, by one algorithm of the host.

    Not announced by itself: each chunk is announced as a call of the host.
    """

    name, summary = "staged", "through pinned host memory, in chunks"

    def __init__(self, staged: Staged, algorithm: str):
        self._staged, self._algorithm = staged, algorithm

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return None: it serves every call."""

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Return the program that serves the chunks."""
        staged, algorithm = self._staged, self._algorithm
        return Program(
            [Round((), None, (partial(staged.serve, call, algorithm),))],
            announced=False,
            begin=lambda give: staged.begin(call, algorithm, give),
        )
