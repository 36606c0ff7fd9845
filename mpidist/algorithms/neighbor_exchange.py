"""Neighbor exchange of n bytes on p ranks: two blocks a round, with left and right in turn."""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Recv, Round, Send


def _even(size: int) -> str | None:
    return f"{size} ranks cannot be paired: expected an even number of ranks" if size % 2 else None


@algorithm("allgather", "neighbor_exchange", requires=_even)
def allgather_neighbor_exchange(rank: int, size: int) -> Iterator[Round]:
    """Neighbours, in alternating pairs, exchange their own blocks, then the newest two blocks.

    Rounds: p/2.  Bytes per rank: (p-1)/p n.
    Source: Chen, Zhang, Zhang and Yuan, "Performance evaluation of allgather algorithms on
    terascale Linux cluster with fast Ethernet", HPC Asia (2005).

    It needs an even number of ranks; 6 ranks, the pairs of each round::

        round 1: 0-1 2-3 4-5    round 2: 1-2 3-4 5-0    round 3: 0-1 2-3 4-5
    """
    odd = rank % 2
    neighbours = (
        ((rank - 1) % size, (rank + 1) % size) if odd else ((rank + 1) % size, (rank - 1) % size)
    )
    pair = rank - odd  # the lower rank of the pair whose two blocks come next
    newest: list[int] = [pair, pair]
    yield Send(neighbours[0], rank), Recv(neighbours[0], neighbours[0])
    last = pair
    # From each side come the pairs that its neighbour got in the round before: they are two ranks
    # further on each time, to the right from one side and to the left from the other.
    for step in range(1, size // 2):
        turn = step % 2
        newest[turn] = (newest[turn] + (2 if turn == odd else -2)) % size
        theirs = newest[turn]
        yield (
            Send(neighbours[turn], (last, last + 1)),
            Recv(neighbours[turn], (theirs, theirs + 1)),
        )
        last = theirs
