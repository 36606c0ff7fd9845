"""Collectives of arrays on a GPU by each path, beside what copies alone would take: a table."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..device.find import find_device
from ..errors import Unsupported
from ..gpu.paths import ORDER, VARIABLE
from .device_case import Copies, DeviceCase, slowest

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
    comm: Any,
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
        See :func:`~mpidist.bench.device_case.measure_copies`.
    """
    rows = []
    for path in ORDER:
        with forced(comm, path) as sub:
            for collective in collectives:
                for nbytes in sizes:
                    rows.append(_row(sub, collective, path, nbytes, dtype, iterations, copies))
    return sorted(rows, key=lambda row: (collectives.index(row.collective), row.bytes))


@contextmanager
def forced(comm: Any, path: str) -> Iterator[Any]:
    """Give a communicator whose arrays on GPUs take one path; collective."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = path
    sub = Communicator(comm.backend.split(0, comm.rank), comm.config)
    try:
        yield sub
        sub.free()
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def _row(
    comm: Any,
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
