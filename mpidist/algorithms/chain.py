"""The chain: each of p ranks sends n bytes to the next; slow as one message, fast in segments."""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Recv, Round, Send
from .relabel import turned


def _broadcast(rank: int, size: int) -> Iterator[Round]:
    if rank:
        yield Recv(rank - 1)
    if rank + 1 < size:
        yield Send(rank + 1)


@algorithm("broadcast", "chain")
def broadcast_chain(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Every rank receives the data from its left neighbour and sends them to the right one.

    Rounds: 2 on each rank (receive, send), p-1 messages in turn.  Bytes per rank: n.
    Source: Patarasu, Faraj and Yuan, "Pipelined broadcast on Ethernet switched clusters", JPDC 68
    (2008).

    5 ranks, root 0::

        0 --> 1 --> 2 --> 3 --> 4
    """
    return turned(rank, size, root, _broadcast)
