"""The star: one of p ranks exchanges n bytes with all others; the baseline for other algorithms."""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Copy, Recv, Reduce, Round, Send
from .relabel import onward, outward


@algorithm("reduce", "linear", ordered=True)
def reduce_linear(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """The root receives and combines the data of one rank after the other, each in its own round.

    With a round per rank one receive buffer is enough; a single round would need p-1 buffers, and
    would not be faster, because the root's port receives one message at a time.

    Rounds: p-1.  Bytes per rank: n.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, root 2, the numbers are rounds::

        0 --2--+     +--3-- 3
               +-> 2 <+
        1 --1--+     +--4-- 4
    """
    if rank != root:
        yield Send(root)
        return
    for peer in outward(rank, size):
        yield Reduce(peer)


@algorithm("broadcast", "linear")
def broadcast_linear(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """The root sends all data to every other rank.

    Rounds: 1 with p-1 messages.  Bytes per rank: (p-1)n on the root, 0 elsewhere.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, root 0::

        0 --> 1, 2, 3, 4
    """
    if rank != root:
        yield Recv(root)
    elif size > 1:
        yield tuple(Send(peer) for peer in onward(rank, size))


@algorithm("allreduce", "linear", ordered=True)
def allreduce_linear(rank: int, size: int) -> Iterator[Round]:
    """Rank 0 combines the data of one rank after the other, then sends the result to all.

    Rounds: p.  Bytes per rank: (p-1)n on rank 0, n elsewhere.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks::

        1, 2, 3, 4 --> 0 --> 1, 2, 3, 4
    """
    yield from reduce_linear(rank, size, root=0)
    yield from broadcast_linear(rank, size, root=0)


@algorithm("barrier", "linear")
def barrier_linear(rank: int, size: int) -> Iterator[Round]:
    """Every rank notifies rank 0 of its arrival; when all have arrived, rank 0 notifies them.

    Rounds: p.  Bytes per rank: empty messages, p-1 of them on rank 0, 1 elsewhere.
    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17
    (1988).

    5 ranks::

        1, 2, 3, 4 --> 0 --> 1, 2, 3, 4
    """
    yield from allreduce_linear(rank, size)


@algorithm("gather", "linear")
def gather_linear(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Every rank sends its block to the root.

    Rounds: 1 with p-1 messages.  Bytes per rank: n/p.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, root 0::

        1, 2, 3, 4 --> 0
    """
    if rank != root:
        yield Send(root, blocks=rank)
    elif size > 1:
        yield tuple(Recv(peer, blocks=peer) for peer in onward(rank, size))


@algorithm("scatter", "linear")
def scatter_linear(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """The root sends every rank its block.

    Rounds: 1 with p-1 messages.  Bytes per rank: (p-1)/p n on the root, 0 elsewhere.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, root 0::

        0 --> 1, 2, 3, 4
    """
    if rank != root:
        yield Recv(root, blocks=rank)
    elif size > 1:
        yield tuple(Send(peer, blocks=peer) for peer in onward(rank, size))


@algorithm("allgather", "linear")
def allgather_linear(rank: int, size: int) -> Iterator[Round]:
    """Rank 0 gathers all blocks, then sends all of them to every other rank.

    Rounds: 2.  Bytes per rank: (p-1)n on rank 0, n/p elsewhere.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks::

        1, 2, 3, 4 --> 0 --> 1, 2, 3, 4
    """
    yield from gather_linear(rank, size, root=0)
    everything = range(size)
    if rank:
        yield Recv(0, blocks=everything)
    elif size > 1:
        yield tuple(Send(peer, blocks=everything) for peer in onward(rank, size))


@algorithm("reduce_scatter", "linear", ordered=True)
def reduce_scatter_linear(rank: int, size: int) -> Iterator[Round]:
    """Rank 0 combines the data of one rank after the other, then sends each rank its block.

    Rounds: p.  Bytes per rank: (p-1)/p n on rank 0, n elsewhere.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks::

        1, 2, 3, 4 --> 0 --> 1, 2, 3, 4
    """
    everything = range(size)
    if rank:
        yield Send(0, blocks=everything)
    else:
        for peer in outward(0, size):
            yield Reduce(peer, blocks=everything)
    yield from scatter_linear(rank, size, root=0)


@algorithm("alltoall", "linear")
def alltoall_linear(rank: int, size: int) -> Iterator[Round]:
    """Every rank sends every other rank the block for that rank, all at once.

    Rounds: 1 with p-1 messages a rank.  Bytes per rank: (p-1)/p n.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    Rank 0 of 5::

        0 --> 1, 2, 3, 4   and   1, 2, 3, 4 --> 0
    """
    others = onward(rank, size)
    # Every rank sends to its right neighbour first, so the left one's message comes first.
    yield (
        Copy(rank, rank),
        *(Send(peer, blocks=peer, buffer="in") for peer in others),
        *(Recv(peer, blocks=peer) for peer in reversed(others)),
    )
