"""The overhead of mpidist: the engine per round, and native beside the bare mpi4py call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ..backends.null import NullBackend
from ..communicator.communicator import Communicator
from ..measure import median
from .cases import BARE
from .contenders import mpi_communicator

RANKS = 33
CALLS, BLOCKS = 200, 30


@dataclass(frozen=True)
class Cost:
    """One figure: what was measured, with which deadline in seconds, and microseconds."""

    what: str
    timeout: float | None
    microseconds: float


def engine_overhead() -> list[Cost]:
    """Measure a round of the engine: a ring of 33 ranks on the backend that moves nothing."""
    costs = []
    for timeout in (None, 60.0):
        comm = Communicator(NullBackend(RANKS))
        comm.timeout = timeout
        x, out = np.zeros(RANKS, np.float32), np.zeros(RANKS, np.float32)
        call = partial(comm.allreduce, x, "sum", out, "ring")
        seconds = min(_block(call, 20) for _ in range(BLOCKS))
        costs.append(Cost("engine, one round (null, ring)", timeout, seconds * 1e6 / rounds()))
    return costs


def rounds() -> int:
    """Return the number of rounds of a ring allreduce of 33 ranks."""
    return 2 * (RANKS - 1)


def native_overhead(comm: Communicator) -> list[Cost]:
    """Measure an allreduce of 8 bytes: bare, and native without and with a deadline, in turns.

    Blocks of calls take turns; a figure is the median over the blocks of the slowest rank's time.

    Raises
    ------
    Unsupported
        If the communicator's backend is not MPI.
    """
    mpi = mpi_communicator(comm)
    x, out = np.ones(1), np.zeros(1)
    bare = partial(mpi.Allreduce, x, out)
    native = partial(comm.allreduce, x, "sum", out, "native")
    deadline = comm.timeout
    entries: list[tuple[str, float | None, Callable[[], Any]]] = [
        (f"{BARE}, 8 bytes", None, bare),
        ("native, 8 bytes", None, native),
        ("native, 8 bytes", deadline or 60.0, native),
    ]
    blocks = np.zeros((BLOCKS, len(entries)))
    for block in blocks:
        for k, (_, timeout, call) in enumerate(entries):
            comm.timeout = timeout
            _block(call, 5)
            mpi.Barrier()
            block[k] = _block(call, CALLS)
    comm.timeout = deadline
    blocks = comm.allreduce(blocks, "max")
    return [
        Cost(name, timeout, median(blocks[:, k].tolist()) * 1e6)
        for k, (name, timeout, _) in enumerate(entries)
    ]


def _block(call: Callable[[], Any], count: int) -> float:
    """Return the mean seconds of a call over `count` calls."""
    begun = perf_counter()
    for _ in range(count):
        call()
    return (perf_counter() - begun) / count
