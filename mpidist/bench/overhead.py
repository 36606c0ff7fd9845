"""The overhead of mpidist: rounds of the engine, the flight record, native beside bare mpi4py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.board import private_words
from ..backends.null import NullBackend
from ..backends.recorder import Recorder
from ..communicator.communicator import Communicator
from ..frameworks.base import nothing
from ..shared_memory.steps import announcing
from .candidates import mpi_communicator
from .cases import BARE
from .machine import make_header
from .race import Contender, medians, race
from .results import Results, Row

RANKS = 33
CALLS, BLOCKS = 200, 30


def measure_overhead(comm: Communicator) -> Results:
    """Measure the engine's rounds, the record, and native beside the bare mpi4py call; collective.

    The rows of the engine and of the record are in rank 0's results only.
    """
    engine = [*engine_overhead(), *record_overhead()] if comm.rank == 0 else []
    rows = [*engine, *native_overhead(comm)]
    return Results(make_header(comm), rows, benchmark="overhead")


def engine_overhead() -> list[Row]:
    """Measure the engine's time per round, without and with a deadline, in this process alone.

    It runs one rank's part of a ring allreduce of 33 ranks on the null backend, which sends
    nothing.  The time is the mean of the fastest block of calls.
    """
    rows = []
    for timeout in (None, 60.0):
        comm = Communicator(NullBackend(RANKS))
        comm.timeout = timeout
        x, out = np.zeros(RANKS, np.float32), np.zeros(RANKS, np.float32)
        call = Contender("ring", partial(comm.allreduce, x, "sum", out, "ring"), calls=20)
        seconds = min(call.block() for _ in range(BLOCKS))
        time_us = seconds * 1e6 / rounds()
        row = Row("one round of a ring", "engine, null backend", RANKS, time_us)
        row.figures["deadline_s"] = timeout or 0
        rows.append(row)
    return rows


def rounds() -> int:
    """Return the number of rounds of the ring allreduce of 33 ranks."""
    return 2 * (RANKS - 1)


def record_overhead() -> list[Row]:
    """Measure what the flight record adds to a call, in compiled code and in Python.

    It is the difference between the announcements of an operation with and without it, each the
    mean of the fastest block of calls, in this process alone.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        track = Recorder(Path(folder) / "flights" / "job", 0, 1).track([0], 0)
        assert track is not None  # the first one
        words = private_words(1)
        pairs = {
            "compiled": (announcing(words, 0, None), announcing(words, 0, track)),
            "Python": (nothing, track.begin),
        }
        for name, (without, recorded) in pairs.items():
            if without is None or recorded is None:
                continue
            both = [Contender(name, partial(act, 1, 77), calls=1000) for act in (without, recorded)]
            times = [min(each) for each in zip(*([b.block() for b in both] for _ in range(BLOCKS)))]
            rows.append(Row("flight record of a call", name, 1, 1e6 * (times[1] - times[0])))
    return rows


def native_overhead(comm: Communicator) -> list[Row]:
    """Measure an allreduce of 8 bytes in turns: bare, and native without and with a deadline.

    The three take turns in blocks of calls.  A row's time is the median over the blocks of the
    slowest rank's mean; ``figures["more_us"]`` is the difference from the bare call in µs.
    """
    mpi = mpi_communicator(comm)
    x, out = np.ones(1), np.zeros(1)
    bare = partial(mpi.Allreduce, x, out)
    native = partial(comm.allreduce, x, "sum", out, "native")
    deadline = comm.timeout
    kinds: list[tuple[str, float | None, Callable[[], Any]]] = [
        (BARE, None, bare),
        ("native", None, native),
        ("native", deadline or 60.0, native),
    ]
    contenders = [
        Contender(name, call, partial(setattr, comm, "timeout", timeout), 0, untimed=5, calls=CALLS)
        for name, timeout, call in kinds
    ]
    times = [1e6 * seconds for seconds in medians(race(comm, contenders, BLOCKS))]
    comm.timeout = deadline
    rows = []
    for time_us, (name, timeout, _) in zip(times, kinds):
        row = Row("allreduce of 8 bytes", name, comm.size, time_us, times[0] / time_us)
        row.figures["deadline_s"] = timeout or 0
        if name != BARE:
            row.figures["more_us"] = time_us - times[0]
        rows.append(row)
    return rows
