"""Bruck's algorithms for n bytes on p ranks: ceil(lg p) rounds for any p, but longer messages."""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Copy, Recv, Round, Send
from .relabel import powers


@algorithm("allgather", "bruck")
def allgather_bruck(rank: int, size: int) -> Iterator[Round]:
    """In round k every rank receives the blocks it lacks from the rank 2^k to its right.

    These are all blocks that the other rank has, except in the last round.

    Rounds: ceil(lg p).  Bytes per rank: (p-1)/p n.
    Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems", TPDS 8 (1997).

    Blocks that rank 0 of 5 has after each round::

        [0]  [0,1]  [0,1,2,3]  [0,1,2,3,4]
    """
    for distance in powers(size):
        count = min(distance, size - distance)
        mine = tuple((rank + i) % size for i in range(count))
        theirs = tuple((rank + distance + i) % size for i in range(count))
        yield Send((rank - distance) % size, mine), Recv((rank + distance) % size, theirs)


@algorithm("alltoall", "bruck", equal_blocks=True)
def alltoall_bruck(rank: int, size: int) -> Iterator[Round]:
    """A block for the rank j places to the right moves by 2^k ranks for every bit k set in j.

    Rounds: ceil(lg p).  Bytes per rank: about n/2 lg p.
    Source: Bruck et al., TPDS 8 (1997).

    The block of rank 0 of 5 for rank 3 (3 = 1 + 2)::

        0 --1--> 1 --2--> 3
    """
    away = tuple(range(1, size))
    yield Copy(rank, rank), Copy(tuple((rank + j) % size for j in away), away, "in", "tmp")
    for distance in powers(size):
        moving = tuple(j for j in away if j & distance)
        # A round may not send and overwrite a block, so blocks are received into "out" first.
        to, source = (rank + distance) % size, (rank - distance) % size
        landing = tuple((rank + j) % size for j in moving)
        yield (Send(to, moving, "tmp"), Recv(source, landing), Copy(landing, moving, "out", "tmp"))
    yield Copy(away, tuple((rank - j) % size for j in away), "tmp", "out")
