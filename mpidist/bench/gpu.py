"""``mpidist bench gpu``: paths of arrays on a GPU, and copies to and from it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..device.find import find_device
from ..device.recognise import describe
from ..errors import InvalidArgument, Unsupported
from ..gpu.ipc import NEEDS
from ..gpu.paths import CLASSES, ORDER, VARIABLE
from .results import make_header

COPIES = 5  # measurements of a copy, of which the median counts


class DeviceCase:
    """One collective with its arrays; values are small, so that any dtype holds the sums."""

    def __init__(
        self, comm: Communicator, collective: str, count: int, dtype: np.dtype, symmetric: bool
    ):
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
        paths = self._comm.gpu.paths
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


def measure_copies(comm: Communicator, nbytes: int) -> Copies:
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


def slowest(comm: Communicator, act: Callable[[], object], stream: int) -> float:
    """Give the seconds until what `act` queues is done, on the slowest rank; collective."""
    device = find_device()
    device.synchronize(stream)
    comm.barrier()
    began = perf_counter()
    act()
    device.synchronize(stream)
    mine = perf_counter() - began
    return float(comm.allreduce(np.array([mine]), "max")[0])


COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast")


@dataclass(frozen=True)
class DeviceRow:
    """A collective of one size by one path.

    Attributes
    ----------
    bytes : int
        Of the whole buffer.
    time_us : float or None
        Median over the iterations of the slowest rank's time, to the end on its stream; None if the
        path cannot be.
    busbw_gbs : float or None
        As in nccl-tests.
    of_copies : float or None
        What copies alone would take, over the time: those that the path cannot do without.
    correct : bool
        Whether every element was right after the last call.
    why_not : str
        Why there is no time.
    """

    collective: str
    path: str
    ranks: int
    bytes: int
    dtype: str
    time_us: float | None = None
    busbw_gbs: float | None = None
    of_copies: float | None = None
    correct: bool = True
    why_not: str = ""

    def as_json(self) -> dict[str, Any]:
        """Give the row for a file."""
        return asdict(self)


def measure_paths(
    comm: Communicator,
    collectives: Sequence[str],
    sizes: Sequence[int],
    dtype: np.dtype,
    iterations: int,
    copies: Copies,
) -> list[DeviceRow]:
    """Measure each path that can be; collective.

    Parameters
    ----------
    comm : Communicator
        The ranks, each with a GPU.
    collectives : sequence of str
        Of :data:`COLLECTIVES`.
    sizes : sequence of int
        Bytes of the whole buffer, rounded down to whole elements for every rank.
    dtype : numpy.dtype
        Of the elements.
    iterations : int
        How many are timed, after one that is not.
    copies : Copies
        See :func:`~mpidist.bench.gpu.measure_copies`.
    """
    rows = []
    for path in ORDER:
        with forced(comm, path) as sub:
            for collective in collectives:
                for nbytes in sizes:
                    rows.append(_row(sub, collective, path, nbytes, dtype, iterations, copies))
    return sorted(rows, key=lambda row: (collectives.index(row.collective), row.bytes))


@contextmanager
def forced(comm: Communicator, path: str) -> Iterator[Communicator]:
    """Give a communicator whose arrays on GPUs take one path; collective."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = path
    backend = comm.backend.split(0, comm.rank)
    assert backend is not None
    sub = Communicator(backend, comm.config)
    try:
        yield sub
        sub.free()
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def _row(
    comm: Communicator,
    collective: str,
    path: str,
    nbytes: int,
    dtype: np.dtype,
    iterations: int,
    copies: Copies,
) -> DeviceRow:
    count = nbytes // dtype.itemsize // comm.size * comm.size
    row = DeviceRow(collective, path, comm.size, count * dtype.itemsize, dtype.name)
    try:
        case = DeviceCase(comm, collective, count, dtype, path == "ipc")
        case.call()
    except Unsupported as error:
        return DeviceRow(**{**asdict(row), "why_not": str(error).partition(": ")[2]})
    if path not in case.taken:
        case.free()
        return DeviceRow(**{**asdict(row), "why_not": "has no form of it"})
    stream = find_device().current_stream()
    seconds = []
    for _ in range(iterations + 1):
        case.fill()
        seconds.append(slowest(comm, case.call, stream))
    median = statistics.median(seconds[1:])
    correct = bool(comm.allreduce(np.array([case.correct()]), "and")[0])
    case.free()
    ways = 2 if collective == "allreduce" else 1
    bus = ways * (comm.size - 1) / comm.size if collective != "broadcast" else 1.0
    bound = _bound(collective, path, row.bytes, comm.size, copies)
    return DeviceRow(
        collective,
        path,
        comm.size,
        row.bytes,
        dtype.name,
        median * 1e6,
        bus * row.bytes / median / 1e9,
        None if bound is None else bound / median,
        correct,
    )


def _bound(collective: str, path: str, nbytes: int, ranks: int, copies: Copies) -> float | None:
    """Give the seconds of the copies that an allreduce by a path cannot do without."""
    if collective != "allreduce":
        return None
    if path == "ipc":  # every rank's input is read, and every rank's result written
        return 2 * ranks * nbytes / copies.on_device
    if path == "staged":  # to the host and back, at the same time
        return ranks * nbytes / min(copies.to_host, copies.from_host)
    return None


@dataclass(frozen=True)
class GpuResults:
    """Results of `mpidist bench gpu`.

    Attributes
    ----------
    header : dict
        Description of the run; ``header["gpus"]`` names the GPU of each rank.
    copies : Copies
        Bandwidths of bare copies.
    rows : list of DeviceRow
        Each collective, size and path.
    """

    header: dict[str, Any]
    copies: Copies
    rows: list[DeviceRow]

    def as_json(self) -> dict[str, Any]:
        """Return the results as a JSON object."""
        rows = [row.as_json() for row in self.rows]
        return {"header": self.header, "copies": asdict(self.copies), "rows": rows}


def measure_gpu(
    comm: Communicator,
    collectives: Sequence[str],
    sizes: Sequence[int],
    dtype: np.dtype,
    iterations: int,
) -> GpuResults:
    """Measure collectives by each path, and bare copies; collective.

    `collectives` are of :data:`COLLECTIVES`, by default all of them; the others are as of
    :func:`measure_paths`.

    Raises
    ------
    InvalidArgument
        If a collective has no path to measure.
    Unsupported
        If a rank has no GPU, or no cupy.
    """
    wrong = [name for name in collectives if name not in COLLECTIVES]
    if wrong:
        raise InvalidArgument(f"bench gpu {wrong[0]}: expected {', '.join(COLLECTIVES)}")
    try:
        comm.use_gpu()
    except Unsupported as error:
        raise Unsupported(f"bench gpu needs cupy, and a GPU for each rank: {error}") from None
    device = find_device()
    copies = measure_copies(comm, max(*sizes, 1 << 20))
    names = tuple(collectives) or COLLECTIVES
    rows = measure_paths(comm, names, sizes, dtype, iterations, copies)
    gpus = comm.allgather_object(f"{device.describe()} {device.identity()}")
    return GpuResults({**make_header(comm), "gpus": gpus}, copies, rows)
