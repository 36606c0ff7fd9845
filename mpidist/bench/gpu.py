"""``mpidist bench gpu``: each executor of arrays on a GPU, and bare copies to compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..device.find import find_device
from ..device.recognise import as_device_array
from ..errors import InvalidArgument, Unsupported
from ..gpu.executors import CLASSES, NAMES, VARIABLE
from ..gpu.ipc import NEEDS
from ..measure import busbw
from ..selection.names import IPC, IPC_SLOTS, STAGED
from .device import name_gpus
from .machine import make_header
from .race import Contender, medians, race
from .results import Refusal, Results, Row

COPIES = 5  # measurements of a copy; their median counts


class DeviceCase:
    """A collective of `count` elements with its arrays on the GPU, and its expected result.

    `symmetric` places the array that "ipc" needs in symmetric memory.  Values are small,
    so that sums are exact.
    """

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
        self._x = self._make(long, bool(need) and (need == "x" or collective == "allreduce"))
        # As gradients are averaged, in place: a private input would be copied first.
        self._out = self._x if collective == "allreduce" else self._make(short, need == "out")
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
        """Names of the executors that this communicator uses and that have this collective."""
        found = [c for c in self._comm.gpu.candidates if c.taken]
        return {c.name for c in found if self._collective in CLASSES[c.operations]}

    def fill(self) -> None:
        """Write the input, and clear the result of the previous call."""
        self._out[...] = 0
        self._x.set(self._host)

    def call(self) -> None:
        """Call the collective once, on this case's arrays."""
        getattr(self._comm, self._collective)(self._x, out=self._out)

    def correct(self) -> bool:
        """Return whether this rank's result is correct."""
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
        """Free the symmetric memory; collective."""
        find_device().finish()
        for made in self._made:
            if made.size:
                self._comm.free(made)


@dataclass(frozen=True)
class Copies:
    """Bytes per second of copies by all ranks at the same time, summed over the ranks."""

    on_device: float  # within GPUs; each byte copied counts twice: read and written
    to_host: float  # from GPUs to pinned host memory; each byte counts once
    from_host: float  # the other way


def measure_copies(comm: Communicator, nbytes: int) -> Copies:
    """Return the rates of copies of `nbytes` per rank, on all ranks at once; collective."""
    device = find_device()
    first, second = (device.empty((nbytes,), np.dtype(np.uint8)) for _ in range(2))
    host = device.pinned(nbytes)
    a, b = as_device_array(first, comm.rank).pointer, as_device_array(second, comm.rank).pointer
    there, stream = host.__array_interface__["data"][0], device.current_stream()

    def copying(target: int, source: int) -> Contender:
        return Contender("copy", partial(device.copy, target, source, nbytes, stream), warm=1)

    contenders = [copying(*pair) for pair in ((b, a), (there, a), (a, there))]
    seconds = medians(race(comm, contenders, COPIES, partial(device.synchronize, stream)))
    speeds = [comm.size * nbytes / each for each in seconds]
    return Copies(2 * speeds[0], *speeds[1:])


GPU_COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast")


def measure_executors(
    comm: Communicator,
    collectives: Sequence[str],
    sizes: Sequence[int],
    dtype: np.dtype,
    iterations: int,
    copies: Copies,
) -> Results:
    """Measure each collective on each executor of GPU arrays; collective.

    Calls that an executor cannot serve are in ``Results.unsupported``.  The figure ``of_copies`` of
    a row is the time of the copies that the executor cannot do without, over the measured time.
    `iterations` are timed, after one that is not; `sizes` are rounded down to whole elements for
    every rank.
    """
    results = Results(benchmark="gpu")
    for executor in NAMES:
        with forced(comm, executor) as sub:
            for collective in collectives:
                for nbytes in sizes:
                    measured = _row(sub, collective, executor, nbytes, dtype, iterations, copies)
                    if isinstance(measured, Row):
                        results.rows.append(measured)
                    else:
                        results.unsupported.append(measured)
    results.rows.sort(key=lambda row: (collectives.index(row.work), row.bytes))
    return results


@contextmanager
def forced(comm: Communicator, executor: str) -> Iterator[Communicator]:
    """Yield a communicator of the same ranks that uses `executor` for arrays on GPUs; collective.

    Within the block the environment variable that chooses the executor is set; it is restored then.
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = executor
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
    executor: str,
    nbytes: int,
    dtype: np.dtype,
    iterations: int,
    copies: Copies,
) -> Row | Refusal:
    count = nbytes // dtype.itemsize // comm.size * comm.size
    nbytes = count * dtype.itemsize
    try:
        case = DeviceCase(comm, collective, count, dtype, executor == IPC)
        case.call()
    except Unsupported as error:
        return Refusal(collective, executor, nbytes, str(error).partition(": ")[2])
    if executor not in case.taken:
        case.free()
        return Refusal(collective, executor, nbytes, f"{executor} does not serve {collective}")
    device = find_device()
    contender = Contender(executor, case.call, case.fill, warm=1)
    wait = partial(device.synchronize, device.current_stream())
    (seconds,) = medians(race(comm, [contender], iterations, wait))
    row = Row(collective, executor, comm.size, 1e6 * seconds, bytes=nbytes, dtype=dtype.name)
    row.correct = bool(comm.allreduce(np.array([case.correct()]), "and")[0])
    row.busbw_gbs = busbw(collective, nbytes, seconds, comm.size)
    case.free()
    bound = _bound(collective, executor, nbytes, comm.size, copies)
    if bound is not None:
        row.figures["of_copies"] = bound / seconds
    return row


def _bound(collective: str, executor: str, nbytes: int, ranks: int, copies: Copies) -> float | None:
    """Return the seconds of the copies that an allreduce by `executor` cannot avoid.

    That is the least time, at the rates of `copies`, for `nbytes` on each of `ranks`.  None for
    other collectives, and for executors whose copies are not known.
    """
    if collective != "allreduce":
        return None
    if executor in (IPC, IPC_SLOTS):  # every rank's input is read, and every rank's result written
        return 2 * ranks * nbytes / copies.on_device
    if executor == STAGED:  # to the host and back, at the same time
        return ranks * nbytes / min(copies.to_host, copies.from_host)
    return None


def measure_gpu(
    comm: Communicator,
    collectives: Sequence[str],
    sizes: Sequence[int],
    dtype: np.dtype,
    iterations: int,
) -> Results:
    """Measure collectives on each executor of GPU arrays, and bare copies; collective.

    `collectives` are names out of :data:`GPU_COLLECTIVES`, all of them if empty; for the other
    parameters see :func:`measure_executors`.
    """
    wrong = [name for name in collectives if name not in GPU_COLLECTIVES]
    if wrong:
        raise InvalidArgument(f"bench gpu {wrong[0]}: expected {', '.join(GPU_COLLECTIVES)}")
    try:
        comm.use_gpu()
    except Unsupported as error:
        raise Unsupported(f"bench gpu needs cupy, and a GPU for each rank: {error}") from None
    copies = measure_copies(comm, max(*sizes, 1 << 20))
    results = measure_executors(
        comm, tuple(collectives) or GPU_COLLECTIVES, sizes, dtype, iterations, copies
    )
    results.header = {**make_header(comm), "copies": asdict(copies)}
    name_gpus(comm, results)
    results.notes.append(
        f"copies of all ranks at once: {copies.on_device / 1e9:.1f} GB/s read and written on GPUs, "
        f"{copies.to_host / 1e9:.1f} to the host, {copies.from_host / 1e9:.1f} from it; % of "
        "copies: time of the bare copies divided by the time"
    )
    return results
