"""Collectives in symmetric device memory: each rank reads everyone's part and writes to all.

Everything is queued on the caller's stream, the barriers too: words in device memory, that each
rank writes on every other and waits for on its own.  A reduction combines in rank order, once for
all, so every rank has the same bits; each rank does its slice, in one pass, and stores it
everywhere.
"""

from __future__ import annotations

from itertools import accumulate

from ..call import Call
from ..device.array import DeviceArray
from ..operations import is_mean
from ..schedule.rounds import blocks
from .arena import Arena, Spot
from .executor import GpuExecutor, GpuProgram

NEEDS = {"allreduce": "out", "broadcast": "out", "allgather": "out", "reduce_scatter": "x"}
"""Which array of a call must be symmetric, on every rank."""
_WORD = 4  # bytes
_AROUND = 1 << 32


def why_not(call: Call, arena: Arena | None) -> str | None:
    """Say why a call cannot be served here, or give None."""
    need = NEEDS.get(call.collective)
    if need is None:
        return f"{call.collective} has no form in symmetric memory of GPUs"
    if arena is None or spot_of(call, arena) is None:
        return f"{need} is no array of comm.empty(device=...)"
    if call.op is not None and not call.op.builtin:
        return "a function of Python does not run on a device"
    if call.op is not None and not arena.device.combines(call.dtype):
        return f"the device has no arithmetic for {call.dtype}"
    return None


def spot_of(call: Call, arena: Arena) -> Spot | None:
    """Give the spot of the array that must be symmetric."""
    return arena.find(call.out if NEEDS[call.collective] == "out" else call.x)


class Push(GpuExecutor):
    """The kernels of one communicator."""

    name = "ipc"

    def __init__(self, arena: Arena):
        self._arena, self._device = arena, arena.device
        self._count = 0
        self._last: int | None = None
        self._mark = self._device.event()

    def takes(self, call: Call, algorithm: str, background: bool) -> bool:
        """Return whether there is a form of it; in the background the ranks would have to meet."""
        return algorithm == "auto" and call.collective in NEEDS and not background

    def why_not(self, call: Call) -> str | None:
        """Return why not: mostly, that the array is private memory."""
        return why_not(call, self._arena)

    def agreed(self, call: Call, algorithm: str) -> str:
        """Return where the array lies."""
        spot = spot_of(call, self._arena)
        assert spot is not None
        return f"in symmetric memory of GPUs {spot.key}"

    def bind(self, call: Call, algorithm: str) -> GpuProgram:
        """Return what queues the call."""
        return GpuProgram(lambda: self.serve(call))

    def serve(self, call: Call) -> None:
        """Queue a call that can be served, when all ranks have come to it."""
        spot = spot_of(call, self._arena)
        assert spot is not None
        data = [a for a in (call.out, call.x) if isinstance(a, DeviceArray)]
        stream = data[0].stream
        for other in {a.stream for a in data[1:]} | {self._last} - {None, stream}:
            assert other is not None
            self._mark.record(other)  # barriers of one communicator follow each other
            self._mark.block(stream)
        getattr(self, f"_{call.collective}")(call, spot, stream)
        for other in {a.stream for a in data[1:]} - {stream}:
            self._mark.record(stream)
            self._mark.block(other)
        self._last = stream

    def _barrier(self, stream: int) -> None:
        """Queue that this stream goes on when those of all ranks have come here."""
        self._count = count = (self._count + 1) % _AROUND
        flags, rank = self._arena.flags, self._arena.rank
        assert flags is not None
        for peer, pointer in enumerate(flags.pointers):
            if peer != rank:
                self._device.write_word(pointer + rank * _WORD, count, stream)
        for peer in range(self._arena.size):
            if peer != rank:
                self._device.wait_word(flags.pointers[rank] + peer * _WORD, count, stream)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes and target != source:
            self._device.copy(target, source, nbytes, stream)

    def _fold(
        self, call: Call, sources: list[int], targets: list[int], count: int, stream: int
    ) -> None:
        if count:
            assert call.op is not None
            divisor = call.size if is_mean(call.op) else 1
            self._device.combine(call.op.name, call.dtype, sources, targets, count, divisor, stream)

    def _allreduce(self, call: Call, spot: Spot, stream: int) -> None:
        outs, item = spot.pointers(), call.dtype.itemsize
        self._copy(outs[call.rank], call.x.pointer, call.x.nbytes, stream)
        mine = blocks(call.count, call.size)[call.rank]
        parts = [pointer + mine.start * item for pointer in outs]
        self._barrier(stream)
        self._fold(call, parts, parts, mine.stop - mine.start, stream)
        self._barrier(stream)

    def _reduce_scatter(self, call: Call, spot: Spot, stream: int) -> None:
        start, item = sum(call.counts[: call.rank]), call.dtype.itemsize
        parts = [pointer + start * item for pointer in spot.pointers()]
        self._barrier(stream)
        self._fold(call, parts, [call.out.pointer], call.counts[call.rank], stream)
        self._barrier(stream)

    def _allgather(self, call: Call, spot: Spot, stream: int) -> None:
        start = ([0, *accumulate(call.counts)][call.rank]) * call.dtype.itemsize
        self._barrier(stream)
        for pointer in spot.pointers():
            self._copy(pointer + start, call.x.pointer, call.x.nbytes, stream)
        self._barrier(stream)

    def _broadcast(self, call: Call, spot: Spot, stream: int) -> None:
        self._barrier(stream)
        if call.rank == call.root:
            for pointer in spot.pointers():
                self._copy(pointer, call.x.pointer, call.x.nbytes, stream)
        self._barrier(stream)
