"""The sum of an array over all ranks: mpidist run -n 4 examples/allreduce.py"""

import numpy as np

import mpidist

comm = mpidist.init()
x = np.full(1_000_000, comm.rank + 1.0)

total = comm.allreduce(x)  # "auto" chooses the algorithm
ring = comm.allreduce(x, algorithm="ring")  # or you do
comm.allreduce(x, op="mean", out=x)  # in place

assert np.array_equal(total, ring) and np.all(x == (comm.size + 1) / 2)
if comm.rank == 0:
    print(f"{comm.size} ranks: sum {total[0]:g}, mean {x[0]:g}")
