"""The staged executor, which serves every call: through page-locked host memory, in chunks.

Copies and messages overlap::

    inward stream    copy in 0 | copy in 1  | copy in 2  | …
    host             .         | exchange 0 | exchange 1 | …
    outward stream   .         | .          | copy out 0 | …

Chunk k is copied to a buffer of host memory on one stream while the ranks exchange chunk k-1, and
chunk k-2 is copied back on a second stream.  Each buffer has two events: its input has been copied
in, its result has been copied out.  The host waits only for the first; the caller's streams wait
for the last result, so that work queued there later sees it.

The buffers of blocking calls are symmetric memory, if the ranks of a node can share some: then each
chunk is a call of symmetric arrays, which takes a third of the time of one of private arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..backends.executor import MESSAGES, ONCE, Executor, Use
from ..backends.program import Program, Round
from ..calls.call import Call, Prepared
from ..device.array import DeviceArray
from ..device.base import Device, InFlight, wait_before_deletion
from ..engine.service import Service
from ..engine.work import Work
from ..errors import Unsupported
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import Choice
from ..selection.names import STAGED
from ..shared_memory.heap import PAGE, Heap
from .chunks import Chunk, Extent, chunks, elements
from .executor import GpuExecutor

log = logging.getLogger("mpidist")


def _shared(call: Call) -> bool:
    """Return whether a chunk's input and result are one memory of the same length."""
    return COLLECTIVES[call.collective].same_length


def bytes_needed(call: Call, chunk: Chunk) -> int:
    """Return the bytes of host memory for a chunk's result, and its input if that is separate."""
    input_size, output_size = elements(chunk.input_extents), elements(chunk.output_extents)
    count = max(input_size, output_size) if _shared(call) else input_size + output_size
    return count * call.dtype.itemsize


def views(
    call: Call, chunk: Chunk, memory: np.ndarray, behind: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return views of a chunk's input and of its result in `memory`.

    The result is at the start, and the input too where the contract allows it
    (:attr:`~mpidist.schedule.contract.Contract.same_length`); else the input begins at the byte
    `behind`, by default at the end of the result, for which `memory` has :func:`bytes_needed`.
    """
    size = call.dtype.itemsize
    inputs, outputs = elements(chunk.input_extents) * size, elements(chunk.output_extents) * size
    start = 0 if _shared(call) else outputs if behind is None else behind
    return memory[start : start + inputs].view(call.dtype), memory[:outputs].view(call.dtype)


def host_call(call: Call, chunk: Chunk, x: np.ndarray, out: np.ndarray) -> Call:
    """Return a chunk of a call as a call on the chunk's host arrays, with no further checks."""
    source = None if call.x is None else x
    target = None if call.out is None else out
    in_place = _shared(call) and source is not None and target is not None
    return replace(
        call,
        x=source,
        out=source if in_place else target,
        counts=chunk.counts,
        out_counts=chunk.out_counts,
        in_place=in_place,
        even=call.even if call.collective == "alltoall" else len(set(chunk.counts)) <= 1,
    )


@dataclass(slots=True, kw_only=True)
class DeviceResult(Prepared):
    """A prepared host call whose result is copied to a GPU at the end.

    ``end()`` queues the copies of the result, ``target()`` returns the user's array.
    """

    end: Callable[[], None]
    target: Callable[[], Any]

    def give(self) -> Any:
        """Queue the copies of the result to the GPU, and return the user's array."""
        self.end()
        return self.target()


CHUNK_BYTES = 4 << 20  # bytes of each array of a chunk
BUFFERS = 3  # of the chunks that are copied in, exchanged, and copied out


class HostBuffer:
    """Host memory for one chunk: `shared`, symmetric memory if there is any, and private memory.

    The former has room for an input and a result of equal lengths, at the same place on every rank.
    The latter grows on demand and never shrinks.  `filled` is complete when the chunk's input has
    been copied to it, `emptied` when its result, if this rank has one, has been copied to the GPU.
    """

    def __init__(self, device: Device):
        self._device = device
        self._memory = np.empty(0, np.uint8)
        self.shared: np.ndarray | None = None
        self.filled, self.emptied = device.event(), device.event()
        wait_before_deletion(self, [self.emptied])

    def views(self, call: Call, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
        """Return :func:`views` in the shared memory, if the call's chunks fit on every rank."""
        if self.shared is not None and not call.uneven_alltoall:
            room = self.shared.nbytes // 2
            # A chunk exceeds the usual length only to have an element of each rank's part.
            if call.size * call.dtype.itemsize <= room:
                return views(call, chunk, self.shared, room)
        return views(call, chunk, self._private(bytes_needed(call, chunk)))

    def _private(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` bytes or more; smaller memory is replaced once its copies are done."""
        if self._memory.nbytes < nbytes:
            self.emptied.synchronize()
            self._memory = self._device.pinned(nbytes)
        return self._memory


class HostStaged:
    """What a communicator's staged executors share: each chunk is a call with host arrays."""

    def __init__(self, service: Service, device: Device, chunk_bytes: int = CHUNK_BYTES):
        self._service, self.device, self.chunk_bytes = service, device, chunk_bytes
        self._buffers = [HostBuffer(device) for _ in range(BUFFERS)]
        self._shares = False  # the ranks have agreed where the buffers are
        self._locked: np.ndarray | None = None
        self._inward, self._outward = device.new_stream(), device.new_stream()
        self._streams: tuple[int, ...] = self._inward, self._outward  # until they are released
        self._ready = device.event()
        self._pending = InFlight()

    def serve(self, call: Call, algorithm: str) -> None:
        """Run a call through host memory; work queued later on the arrays' streams waits for it."""
        if not self._shares:
            self._share(call)
        streams = self._wait_for_arrays(call)
        parts = list(chunks(call, self.chunk_bytes))
        self._copy_in(call, parts[0], self._buffers[0])
        for number, chunk in enumerate(parts):
            buffer = self._buffers[number % BUFFERS]
            if number + 1 < len(parts):
                self._copy_in(call, parts[number + 1], self._buffers[(number + 1) % BUFFERS])
            buffer.filled.synchronize()
            x, out = buffer.views(call, chunk)
            part = Prepared(host_call(call, chunk, x, out), None)
            self._service.serve(part, algorithm)
            self._copy_back(call, chunk, out)
            buffer.emptied.record(self._outward)
        self._let_arrays_wait(streams)

    def begin(self, call: Call, algorithm: str, give: Callable[[], Any]) -> Work:
        """Begin a call in the background; ``wait()`` of its Work returns the value of ``give()``.

        The call is a single chunk: ranks could begin later chunks in different orders among other
        calls of the user.
        """
        streams = self._wait_for_arrays(call)
        (chunk,) = chunks(call, max(call.nbytes, self._bytes_of(call), 1) * call.size)
        memory = self.device.pinned(max(bytes_needed(call, chunk), 1))
        x, out = views(call, chunk, memory)
        self._copy(call.x, chunk.input_extents, x, self._inward, inward=True)
        self.device.synchronize(self._inward)

        def end() -> None:
            self._copy_back(call, chunk, out)
            copied = self.device.event()
            copied.record(self._outward)
            self._pending.hold(copied, memory)  # the copy still reads it when end() has returned
            self._let_arrays_wait(streams)

        part = DeviceResult(host_call(call, chunk, x, out), None, end=end, target=give)
        return self._service.background.begin(part, algorithm)

    def _bytes_of(self, call: Call) -> int:
        arrays = [data for data in (call.x, call.out) if data is not None]
        return sum(data.nbytes for data in arrays)

    def close(self) -> None:
        """Release the streams and the shared memory, once the results are copied to the GPU."""
        streams, self._streams = self._streams, ()
        for stream in streams:
            self.device.release_stream(stream)
        self._give_back()

    def __del__(self) -> None:
        with suppress(Exception):  # the driver may have been shut down with the interpreter
            self.close()

    # -- shared memory --------------------------------------------------------------------------

    def _share(self, call: Call) -> None:
        """Put the buffers in symmetric memory, on all ranks or none; collective."""
        heap, sequencer = self._service.heap, self._service.sequencer
        if heap is not None:
            # Not the call's text alone: a rank that calls the library announces the same.
            operation = f"{call.signature} through host memory"
            sequencer.set_up(operation, partial(self._take, heap), "set-up of shared memory")
        self._shares = True

    def _take(self, heap: Heap) -> None:
        """Allocate page-locked symmetric memory, unless a rank cannot; collective."""
        room = -(-self.chunk_bytes // PAGE) * PAGE  # of an input, or of a result
        problem = ""
        try:
            memory = heap.empty((2 * BUFFERS * room,), np.dtype(np.uint8))
        except MemoryError as error:  # on all ranks
            log.debug("chunks of GPU arrays go through private memory: %s", error)
            return
        try:
            self.device.page_lock(memory)
            self._locked = memory
        except Unsupported as error:
            problem = str(error)
        problems = [f"rank {r}: {p}" for r, p in enumerate(heap.everyone(problem)) if p]
        if problems:
            log.debug("chunks of GPU arrays go through private memory: %s", "; ".join(problems))
            self._give_back()
            return
        for buffer, part in zip(self._buffers, memory.reshape(BUFFERS, -1)):
            buffer.shared = part

    def _give_back(self) -> None:
        """Release the symmetric memory, of which no copy is queued any more."""
        for buffer in self._buffers:
            buffer.shared = None
        memory, self._locked = self._locked, None
        if memory is not None:
            self.device.page_unlock(memory)

    # -- ordering -------------------------------------------------------------------------------

    def _wait_for_arrays(self, call: Call) -> set[int]:
        """Make the copy streams wait for work queued on the arrays' streams; return the latter."""
        streams = {data.stream for data in (call.x, call.out) if isinstance(data, DeviceArray)}
        for stream in streams:
            self._ready.record(stream)
            self._ready.block(self._inward)
            self._ready.block(self._outward)
        return streams

    def _let_arrays_wait(self, streams: set[int]) -> None:
        """Make the arrays' streams wait until all results are copied to the GPU."""
        for ours in (self._inward, self._outward):
            self._ready.record(ours)
            for stream in streams:
                self._ready.block(stream)

    # -- copies ---------------------------------------------------------------------------------

    def _copy_in(self, call: Call, chunk: Chunk, buffer: HostBuffer) -> None:
        """Queue the copy of a chunk's input to a buffer, after that of the buffer's last result."""
        buffer.emptied.block(self._inward)
        x, _ = buffer.views(call, chunk)
        self._copy(call.x, chunk.input_extents, x, self._inward, inward=True)
        buffer.filled.record(self._inward)

    def _copy_back(self, call: Call, chunk: Chunk, out: np.ndarray) -> None:
        self._copy(call.out, chunk.output_extents, out, self._outward, inward=False)

    def _copy(
        self, data: Any, extents: Sequence[Extent], host: np.ndarray, stream: int, inward: bool
    ) -> None:
        """Queue copies between ranges of a GPU array and consecutive host memory.

        They are to the host if `inward`, else to the GPU; none if `data` is None.
        """
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


class Staged(GpuExecutor):
    """The staged executor: each chunk is a host call, with "auto" or the schedule of the call.

    Its programs are not announced to the other ranks: the host call of each chunk is.
    """

    name, summary = STAGED, "through pinned host memory, in chunks"
    memory: str | None = MESSAGES
    algorithm = "auto"  # of the host calls, if the call names no schedule

    def __init__(self, staged: HostStaged):
        super().__init__(None)
        self._staged = staged

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        """Return None: the staged executor serves every call."""

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        """Return a program that runs the call, chunk by chunk."""
        staged, algorithm = self._staged, self.algorithm if choice is None else choice.name
        return Program(
            [Round((), None, (partial(staged.serve, call, algorithm),))],
            announced=False,
            begin=lambda give: staged.begin(call, algorithm, give),
        )


class Through(Staged):
    """An executor of host arrays, which gets the chunks of GPU arrays in pinned host memory.

    For calls that one of `others` can serve, the name of `host` stands for that one.
    """

    memory = None

    def __init__(self, staged: HostStaged, host: Executor, others: Sequence[Executor] = ()):
        super().__init__(staged)
        self._host, self._others, self.name, self.algorithm = host, others, host.name, host.name
        self.summary = f"through pinned host memory, in chunks: {host.summary}"

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        """Return why the executor cannot serve the call's chunks."""
        for other in self._others:
            if other.why_not(call, algorithm, background) is None:
                return f"for arrays on a GPU {self.name} is {other.name}"
        return self._host.why_not(call, algorithm, background)
