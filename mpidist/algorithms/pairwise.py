"""Pairwise exchange by p ranks of n bytes each: one partner per round, another in each round."""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Copy, Recv, Round, Send


@algorithm("alltoall", "pairwise")
def alltoall_pairwise(rank: int, size: int) -> Iterator[Round]:
    """In round k every rank sends k ranks to the right and receives from k ranks to the left.

    Rounds: p-1.  Bytes per rank: (p-1)/p n.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    Rank 0 of 5, one column a round::

        0 --> 1    0 --> 2    0 --> 3    0 --> 4
        4 --> 0    3 --> 0    2 --> 0    1 --> 0
    """
    yield Copy(rank, rank)
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        yield Send(to, blocks=to, buffer="in"), Recv(source, blocks=source)
