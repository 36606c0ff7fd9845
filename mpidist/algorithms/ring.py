"""The ring: each of p ranks sends only to its right neighbour, 1/p of the n bytes at a time."""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Recv, Reduce, Round, Send


@algorithm("reduce_scatter", "ring")
def reduce_scatter_ring(rank: int, size: int) -> Iterator[Round]:
    """Block k travels right, gaining one term per hop, and ends on rank k.

    Rounds: p-1.  Bytes per rank: (p-1)/p n.
    Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 69 (2009).

    Block 4 on 5 ranks, one arrow a round::

        0 --> 1 --> 2 --> 3 --> 4
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(1, size):
        yield (
            Send(right, blocks=(rank - step) % size),
            Reduce(left, blocks=(rank - step - 1) % size),
        )


@algorithm("allgather", "ring")
def allgather_ring(rank: int, size: int) -> Iterator[Round]:
    """Every rank sends its right neighbour the block that it received last.

    Rounds: p-1.  Bytes per rank: (p-1)/p n.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19 (2005).

    Block 0 on 5 ranks, one arrow a round::

        0 --> 1 --> 2 --> 3 --> 4
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(size - 1):
        yield Send(right, blocks=(rank - step) % size), Recv(left, blocks=(rank - step - 1) % size)


@algorithm("allreduce", "ring", blocks=lambda size: size)
def allreduce_ring(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter along the ring, then allgather along the same ring.

    Rounds: 2(p-1).  Bytes per rank: 2(p-1)/p n, the lower bound.
    Source: Patarasu and Yuan, JPDC 69 (2009).

    5 ranks, the first lap reduces and the second copies::

        +--> 0 --> 1 --> 2 --> 3 --> 4 --+
        +--------------------------------+
    """
    yield from reduce_scatter_ring(rank, size)
    yield from allgather_ring(rank, size)
