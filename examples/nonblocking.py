"""Two allreduces in the background of a computation.

mpidist run -n 2 examples/nonblocking.py
"""

import numpy as np

import mpidist

comm = mpidist.init()
options = {"op": "mean", "algorithm": "ring"}
gradients = [np.full(100_000, comm.rank + k + 1.0) for k in range(2)]
works = [comm.iallreduce(g, out=g, **options) for g in gradients]

inside = 0.0
while not all(work.test() for work in works):  # test() makes progress
    inside += float(np.ones(1000).sum())  # the rank's own computation

for k, work in enumerate(works):
    assert work.wait() is gradients[k]  # complete: wait() returns the result
    assert np.all(gradients[k] == (comm.size + 1) / 2 + k)
if comm.rank == 0:
    means = " and ".join(f"{g[0]:g}" for g in gradients)
    print(f"{comm.size} ranks: means {means}")
