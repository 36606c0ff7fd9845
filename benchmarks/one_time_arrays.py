"""What a small allreduce takes of arrays that are used again, and of new ones each time.

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
WAYS = ("native", "staged")
CALLS = 300


def timed(comm: mpidist.Communicator, call: Callable[[], object]) -> float:
    """Give the median of the slowest rank's times, in µs."""
    times = np.empty(CALLS)
    for number in range(CALLS):
        comm.barrier()
        begin = time.perf_counter()
        call()
        times[number] = time.perf_counter() - begin
    return median(comm.allreduce(times, "max", algorithm="native").tolist()) * 1e6


def main() -> None:
    """Print a line for each size: new arrays, then the same ones again."""
    comm = mpidist.init()
    for nbytes in SIZES:
        x = np.ones(nbytes // 4, "float32")
        out, said = np.empty_like(x), []
        for way in WAYS:
            once = timed(comm, lambda way=way, x=x: comm.allreduce(x.copy(), algorithm=way))
            again = timed(comm, lambda way=way, x=x, out=out: comm.allreduce(x, "sum", out, way))
            said.append(f"{way} {once:6.1f} used once, {again:6.1f} again")
        if comm.rank == 0:
            sys.stdout.write(f"{nbytes:7} bytes, µs: {'; '.join(said)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
