"""The way that always works: through pinned host memory, in chunks, copying while others move.

Chunk k is brought to a slot of host memory on one stream while chunk k-1 is on its way between the
ranks, and chunk k-2 returns on a second stream.  Each slot has two events: its input has come, and
its result has gone.  The host waits only for the first; the caller's streams wait for the last
result, so that work queued there later sees it.
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
    """Give how much host memory a chunk takes; the input begins where the result ends."""
    brings, gets = elements(chunk.brings), elements(chunk.gets)
    one = max(brings, gets) if call.collective in _SHARED else brings + gets
    return one * call.dtype.itemsize


def views(call: Call, chunk: Chunk, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the input and the result of a chunk, in host memory of :func:`bytes_needed` bytes."""
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
    """A prepared host call that gives an array on a GPU.

    Attributes
    ----------
    end : callable or None
        Queues what brings the result there.
    target : callable or None
        Returns the user's array.
    """

    end: Callable[[], None] | None = None
    target: Callable[[], Any] | None = None

    @classmethod
    def of(cls, part: Prepared, end: Callable[[], None], target: Callable[[], Any]) -> Landing:
        """Have a host call end on a GPU."""
        return cls(
            part.call, part.result, part.staging, part.scalar, part.shown, end=end, target=target
        )

    def give(self) -> Any:
        """Bring the result there, and give the user's array."""
        super(Landing, self).give()
        assert self.end is not None and self.target is not None
        self.end()
        return self.target()


CHUNK_BYTES = 4 << 20  # of a chunk's array
SLOTS = 3


class Slot:
    """Host memory for one chunk; it grows to what is asked for and stays.

    Attributes
    ----------
    filled, emptied : Event
        The input has come; the result has gone, or what was there is of no use any more.
    """

    def __init__(self, device: Device):
        self._device = device
        self._memory = np.empty(0, np.uint8)
        self.filled, self.emptied = device.event(), device.event()

    def memory(self, nbytes: int) -> np.ndarray:
        """Give at least so many bytes; the memory that was there before is out of use by then."""
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
        Where the arrays are.
    chunk_bytes : int
        Of an array that goes in one piece.
    """

    def __init__(self, service: Service, device: Device, chunk_bytes: int = CHUNK_BYTES):
        self._service, self.device, self.chunk_bytes = service, device, chunk_bytes
        self._slots = [Slot(device) for _ in range(SLOTS)]
        self._inward, self._outward = device.new_stream(), device.new_stream()
        self._ready = device.event()
        self._under_way = InFlight()

    def by(self, algorithm: str) -> Executor:
        """Return the executor whose chunks are served by an algorithm."""
        return _StagedBy(self, algorithm)

    def serve(self, call: Call, algorithm: str) -> None:
        """Serve a call; the result is there for whatever its streams do next."""
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

        It goes in one piece: were chunks begun as they come, the ranks would begin them in orders
        of their own, between the calls that their users make.
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
            self._under_way.hold(gone, memory)  # the copy reads it after this has returned
            self._leave(streams)

        part = Landing.of(hosted(call, chunk, x, out), end, give)
        return self._service.background.begin(part, algorithm)

    def _bytes_of(self, call: Call) -> int:
        arrays = [data for data in (call.x, call.out) if data is not None]
        return sum(data.nbytes for data in arrays)

    # -- ordering -------------------------------------------------------------------------------

    def _enter(self, call: Call) -> set[int]:
        """Have our streams wait for all that was queued on the arrays' streams."""
        streams = {data.stream for data in (call.x, call.out) if isinstance(data, DeviceArray)}
        for stream in streams:
            self._ready.record(stream)
            self._ready.block(self._inward)
            self._ready.block(self._outward)
        return streams

    def _leave(self, streams: set[int]) -> None:
        """Have the arrays' streams wait for all results."""
        for ours in (self._inward, self._outward):
            self._ready.record(ours)
            for stream in streams:
                self._ready.block(stream)

    # -- copies ---------------------------------------------------------------------------------

    def _bring(self, call: Call, chunk: Chunk, slot: Slot) -> None:
        """Queue that a chunk's input comes to a slot, as soon as that is free."""
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

    Not announced by itself: the host agrees on each chunk.
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
