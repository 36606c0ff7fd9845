"""What is measured on a GPU: one collective with its arrays, and copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..device.find import find_device
from ..device.recognise import describe
from ..gpu.ipc import NEEDS
from ..gpu.paths import CLASSES

COPIES = 5  # measurements of a copy, of which the median counts


class DeviceCase:
    """One collective with its arrays; values are small, so that any dtype holds the sums."""

    def __init__(self, comm: Any, collective: str, count: int, dtype: np.dtype, symmetric: bool):
        self._comm, self._collective, self._dtype = comm, collective, dtype
        part = count // comm.size
        long, short = (count, part) if collective == "reduce_scatter" else (part, count)
        if collective in ("allreduce", "broadcast"):
            long = short = count
        need = NEEDS[collective] if symmetric else ""
        self._made: list[Any] = []
        self._x = self._make(long, need == "x")
        self._out = self._make(short, need == "out")
        self._host = self._values(comm.rank, long)
        self._part = part

    def _make(self, count: int, symmetric: bool) -> Any:
        if not symmetric:
            return find_device().empty((count,), self._dtype)
        self._made.append(self._comm.empty(count, self._dtype, device="cuda"))
        return self._made[-1]

    def _values(self, rank: int, count: int) -> np.ndarray:
        return ((np.arange(count) + rank) % 3).astype(self._dtype)

    @property
    def taken(self) -> set[str]:
        """The paths that serve this collective."""
        paths = self._comm._gpu.paths
        return {p.name for p in paths if p.taken and self._collective in CLASSES[p.operations]}

    def fill(self) -> None:
        """Write the input anew, and take the result of the call before away."""
        self._out[...] = 0
        self._x.set(self._host)

    def call(self) -> None:
        """Make the call once."""
        getattr(self._comm, self._collective)(self._x, out=self._out)

    def correct(self) -> bool:
        """Tell whether this rank's result is right."""
        rank, size, length = self._comm.rank, self._comm.size, self._host.size
        every = [self._values(r, length) for r in range(size)]
        expected: Any = every[0]
        if self._collective == "allgather":
            expected = np.concatenate(every)
        elif self._collective != "broadcast":
            expected = sum(every[1:], every[0])
        if self._collective == "reduce_scatter":
            expected = expected[rank * self._part : (rank + 1) * self._part]
        return bool((self._out.get() == expected).all())

    def free(self) -> None:
        """Give symmetric memory back; collective."""
        find_device().finish()
        for made in self._made:
            if made.size:
                self._comm.free(made)


@dataclass(frozen=True)
class Copies:
    """Bytes per second of copies, made by all ranks at the same time, in all.

    Attributes
    ----------
    on_device : float
        Within GPUs; a byte that is read and written counts twice.
    to_host, from_host : float
        Between GPUs and pinned host memory.
    """

    on_device: float
    to_host: float
    from_host: float


def measure_copies(comm: Any, nbytes: int) -> Copies:
    """Measure copies of so many bytes on each rank, all of them at once; collective."""
    device = find_device()
    first, second = (device.empty((nbytes,), np.dtype(np.uint8)) for _ in range(2))
    host = device.pinned(nbytes)
    a, b = describe(first, comm.rank).pointer, describe(second, comm.rank).pointer
    there, stream = host.__array_interface__["data"][0], device.current_stream()

    def speed(target: int, source: int) -> float:
        def copy() -> None:
            device.copy(target, source, nbytes, stream)

        seconds = [slowest(comm, copy, stream) for _ in range(COPIES + 1)][1:]
        return comm.size * nbytes / statistics.median(seconds)

    return Copies(2 * speed(b, a), speed(there, a), speed(a, there))


def slowest(comm: Any, act: Callable[[], object], stream: int) -> float:
    """Give the seconds until what `act` queues is done, on the slowest rank; collective."""
    device = find_device()
    device.synchronize(stream)
    comm.barrier()
    began = perf_counter()
    act()
    device.synchronize(stream)
    mine = perf_counter() - began
    return float(comm.allreduce(np.array([mine]), "max")[0])
