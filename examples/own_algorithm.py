"""A user-defined allreduce, half of the data each way round the ring.

mpidist run -n 4 examples/own_algorithm.py
"""

import numpy as np

import mpidist
from mpidist.schedule import Recv, Reduce, Send, algorithm, on, parallel


def lap(rank, size):
    """Reduce-scatter, then allgather; every message goes to the right."""
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(1, size):
        sent, received = (rank - step) % size, (rank - step - 1) % size
        yield Send(right, sent), Reduce(left, received)
    for step in range(size - 1):
        sent, received = (rank - step) % size, (rank - step - 1) % size
        yield Send(right, sent), Recv(left, received)


@algorithm("allreduce", "two_way_ring", blocks=lambda size: 2 * size)
def allreduce_two_way_ring(rank, size):
    """One half of the data travels to the right, the other half to the left.

    Rounds: 4(p-1), two at a time.  Bytes per rank: 2(p-1)/p n, the lower bound.
    """
    mirrored = lap(size - 1 - rank, size)
    yield parallel(
        lap(rank, size),
        on(range(size - 1, -1, -1), mirrored, lambda block: size + block),
    )


if __name__ == "__main__":
    comm = mpidist.init()
    x = np.full(1000, comm.rank + 1.0)
    total = comm.allreduce(x, algorithm="two_way_ring")
    if comm.rank == 0:
        print(f"{comm.size} ranks: {total[0]:g}")
