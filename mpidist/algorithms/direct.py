"""Direct ("two-shot"): each of p ranks owns 1/p of n bytes, exchanged with all ranks at once."""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Recv, Reduce, Round, Send
from .linear import gather_linear
from .relabel import onward, outward


@algorithm("reduce_scatter", "direct", ordered=True, at_once=True)
def reduce_scatter_direct(rank: int, size: int) -> Iterator[Round]:
    """Every rank sends block d to rank d, which combines the blocks in rank order.

    Rounds: 1 with p-1 messages a rank.  Bytes per rank: (p-1)/p n.
    Source: the first step of the "two-shot" allreduce of GPU libraries with peer access.

    Block 2 on 5 ranks::

        0, 1, 3, 4 --> 2
    """
    if size > 1:
        yield (
            *(Send(peer, blocks=peer) for peer in onward(rank, size)),
            *(Reduce(peer, blocks=rank) for peer in outward(rank, size)),
        )


@algorithm("allgather", "direct")
def allgather_direct(rank: int, size: int) -> Iterator[Round]:
    """Every rank sends its block to every other rank.

    Rounds: 1 with p-1 messages a rank.  Bytes per rank: (p-1)/p n.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    Block 2 on 5 ranks::

        2 --> 0, 1, 3, 4
    """
    if size > 1:
        others = onward(rank, size)
        # Every rank sends to its right neighbour first, so the left one's message comes first.
        yield (
            *(Send(peer, blocks=rank) for peer in others),
            *(Recv(peer, blocks=peer) for peer in reversed(others)),
        )


@algorithm("allreduce", "direct", blocks=lambda size: size, ordered=True, at_once=True)
def allreduce_direct(rank: int, size: int) -> Iterator[Round]:
    """Rank d combines block d of all ranks, then sends the result to every other rank.

    Rounds: 2 with p-1 messages a rank each.  Bytes per rank: 2(p-1)/p n, the lower bound.
    Source: known as "two-shot" in GPU libraries with peer access.

    Block 2 on 5 ranks::

        0, 1, 3, 4 --> 2 --> 0, 1, 3, 4
    """
    yield from reduce_scatter_direct(rank, size)
    yield from allgather_direct(rank, size)


@algorithm("reduce", "direct", blocks=lambda size: size, ordered=True, at_once=True)
def reduce_direct(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Rank d combines block d of all ranks, then sends the result to the root.

    Rounds: 2 with up to p-1 messages a rank each.  Bytes per rank: n, on the root (p-1)/p n.
    Source: the "two-shot" reduction of GPU libraries with peer access, to one rank.

    Block 2 on 5 ranks, root 0::

        0, 1, 3, 4 --> 2 --> 0
    """
    yield from reduce_scatter_direct(rank, size)
    yield from gather_linear(rank, size, root=root)
