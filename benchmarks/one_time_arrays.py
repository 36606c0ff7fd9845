"""Time of a small allreduce of arrays that are used again, and of new arrays in each call.

mpidist run -n 2 -- python benchmarks/one_time_arrays.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np

import mpidist

SIZES = (8, 4 << 10, 64 << 10, 256 << 10)  # bytes
ALGORITHMS = ("native", "staged")
CALLS = 300


def timed(comm: mpidist.Communicator, call: Callable[[], object]) -> float:
    """Return the median of the slowest rank's times, in µs."""
    times = np.empty(CALLS)
    for number in range(CALLS):
        comm.barrier()
        begin = time.perf_counter()
        call()
        times[number] = time.perf_counter() - begin
    return median(comm.allreduce(times, "max", algorithm="native").tolist()) * 1e6


def main() -> None:
    """Print a line for each size: times of new arrays, then of the same ones again."""
    comm = mpidist.init()
    for nbytes in SIZES:
        x = np.ones(nbytes // 4, "float32")
        out, texts = np.empty_like(x), []
        for name in ALGORITHMS:
            once = timed(comm, lambda name=name, x=x: comm.allreduce(x.copy(), algorithm=name))
            again = timed(comm, lambda name=name, x=x, out=out: comm.allreduce(x, "sum", out, name))
            texts.append(f"{name} {once:6.1f} used once, {again:6.1f} again")
        if comm.rank == 0:
            sys.stdout.write(f"{nbytes:7} bytes, µs: {'; '.join(texts)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
