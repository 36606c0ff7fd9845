"""Gain and cost of streaming stores: times of a call alone, and with the first read of its result.

mpidist run -n 2 -- python benchmarks/first_reading.py

Prints the time with streaming stores divided by the time without: medians, slowest rank.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from time import perf_counter

import numpy as np

import mpidist
from mpidist.shared_memory.compiled import VARIABLE

SIZES = (1, 2, 4, 8, 16, 64)  # MiB


def main() -> None:
    """Measure an allreduce out of place and an allgather."""
    comm = mpidist.init()
    for size in SIZES:
        for collective in ("allreduce", "allgather"):
            alone, read = compare(comm, collective, size << 18)
            if comm.rank == 0:
                sys.stdout.write(f"{collective} {size} MiB: {alone:.2f}, with reading {read:.2f}\n")
                sys.stdout.flush()


def compare(comm: mpidist.Communicator, collective: str, count: int) -> np.ndarray:
    """Return both times with streaming stores, divided by those without."""
    total, cases = np.zeros(count, np.float32), {}
    for least in ("none", "0"):
        os.environ[VARIABLE] = least  # read when a call is first made with an array
        x = comm.empty(count if collective == "allreduce" else count // comm.size)
        out = comm.empty(count)
        call = partial(getattr(comm, collective), x, out=out, algorithm="symmetric")
        call()
        cases[least] = x, out, call, []
    for turn in range(40 if count < 4 << 20 else 12):
        for x, out, call, times in list(cases.values())[:: 1 - 2 * (turn % 2)]:
            x[:] = turn + comm.rank
            comm.barrier()
            begun = perf_counter()
            call()
            called = perf_counter()
            np.add(total, out, total)
            comm.barrier()
            times.append((called - begun, perf_counter() - begun))
    times = {k: comm.allreduce(np.array(case[3]), "max") for k, case in cases.items()}
    return np.median(times["0"], axis=0) / np.median(times["none"], axis=0)


if __name__ == "__main__":
    main()
