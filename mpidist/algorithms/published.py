"""Published: the ranks of a node read each other's arrays, but cannot write them; n bytes, p ranks.

All ranks meet before the first access, after each one whose result others read, and after the
last.  Every reduction combines in the order of ``direct``, so it has the same bits.

Those that are registered for mapped memory as well only read there, too.
"""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Copy, Fold, Get, Meet, Round
from .relabel import inward, onward


@algorithm(
    "allreduce",
    "published",
    blocks=lambda size: size,
    ordered=True,
    memory="published",
    at_once=True,
)
def allreduce_published(rank: int, size: int) -> Iterator[Round]:
    """Rank d combines block d of all arrays, then every rank fetches the blocks of the others.

    Rounds: 2 between 3 meetings.  Bytes per rank: 2(p-1)/p n read, the lower bound.

    Block 2 on 5 ranks::

        0, 1, 3, 4 --> 2 --> 0, 1, 3, 4
    """
    yield Meet(range(size))
    yield Fold(inward(rank, size), blocks=rank)
    yield Meet(range(size))
    yield tuple(Get(peer, blocks=peer) for peer in onward(rank, size))
    yield Meet(range(size))


@algorithm("reduce_scatter", "in_place", ordered=True, memory="mapped", at_once=True)
@algorithm("reduce_scatter", "published", ordered=True, memory="published", at_once=True)
def reduce_scatter_published(rank: int, size: int) -> Iterator[Round]:
    """Rank d combines block d of all arrays.

    Rounds: 1 between 2 meetings.  Bytes per rank: (p-1)/p n read.

    Block 2 on 5 ranks::

        0, 1, 3, 4 --> 2
    """
    yield Meet(range(size))
    yield Fold(inward(rank, size), blocks=rank)
    yield Meet(range(size))


@algorithm(
    "reduce", "published", blocks=lambda size: size, ordered=True, memory="published", at_once=True
)
def reduce_published(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Rank d combines block d of all arrays, then the root fetches the blocks of the others.

    Rounds: 2 between 3 meetings.  Bytes per rank: (p-1)/p n read, by the root twice that.

    Block 2 on 5 ranks, root 0::

        0, 1, 3, 4 --> 2 --> 0
    """
    yield Meet(range(size))
    yield Fold(inward(rank, size), blocks=rank, target="out" if rank == root else "tmp")
    yield Meet(range(size))
    if rank == root:
        yield tuple(Get(peer, blocks=peer, source="tmp") for peer in onward(rank, size))
    yield Meet(range(size))


@algorithm("allgather", "published", memory="published")
def allgather_published(rank: int, size: int) -> Iterator[Round]:
    """Every rank fetches the blocks of the others.

    Rounds: 1 between 2 meetings.  Bytes per rank: (p-1)/p n read.

    Block 2 on 5 ranks::

        2 --> 0, 1, 3, 4
    """
    yield Meet(range(size))
    fetched = (Get(peer, blocks=peer, source="in") for peer in onward(rank, size))
    yield (Copy(rank, rank), *fetched)
    yield Meet(range(size))


@algorithm("broadcast", "published", memory="published")
def broadcast_published(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Every rank fetches the data from the root.

    Rounds: 1 between 2 meetings.  Bytes per rank: n read.

    5 ranks, root 0::

        0 --> 1, 2, 3, 4
    """
    yield Meet(range(size))
    yield Copy(0, 0) if rank == root else Get(root, source="in")
    yield Meet(range(size))


@algorithm("gather", "in_place_fetched", memory="mapped")
@algorithm("gather", "published", memory="published")
def gather_published(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """The root fetches the blocks of the others, which wait for the root only.

    In mapped memory it is for a result that only the root reaches.

    Rounds: 1 between 2 meetings.  Bytes per rank: (p-1)/p n read by the root.

    5 ranks, root 0::

        1, 2, 3, 4 --> 0
    """
    yield Meet(range(size))
    if rank == root:
        fetched = (Get(peer, blocks=peer, source="in") for peer in onward(rank, size))
        yield (Copy(rank, rank), *fetched)
    yield Meet(range(size), awaits=() if rank == root else (root,))


@algorithm("scatter", "in_place", memory="mapped")
@algorithm("scatter", "published", memory="published")
def scatter_published(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Every rank fetches its block from the root, and waits for no other rank afterwards.

    Rounds: 1 between 2 meetings.  Bytes per rank: n/p read.

    5 ranks, root 0::

        0 --> 1, 2, 3, 4
    """
    yield Meet(range(size))
    yield Copy(rank, rank) if rank == root else Get(root, blocks=rank, source="in")
    yield Meet(range(size), awaits=None if rank == root else ())


@algorithm("alltoall", "in_place", memory="mapped")
@algorithm("alltoall", "published", memory="published")
def alltoall_published(rank: int, size: int) -> Iterator[Round]:
    """Every rank fetches its block from each of the others.

    Rounds: 1 between 2 meetings.  Bytes per rank: (p-1)/p n read.

    5 ranks, what rank 2 fetches::

        0, 1, 3, 4 --> 2
    """
    yield Meet(range(size))
    fetched = (Get(peer, blocks=rank, source="in", to=peer) for peer in onward(rank, size))
    yield (Copy(rank, rank), *fetched)
    yield Meet(range(size))


@algorithm("barrier", "in_place", memory="mapped")
@algorithm("barrier", "slots", memory="slots")
@algorithm("barrier", "published", memory="published")
def barrier_published(rank: int, size: int) -> Iterator[Round]:
    """All ranks meet.

    Rounds: 1 meeting.  Bytes per rank: none.

    5 ranks::

        (0, 1, 2, 3, 4)
    """
    yield Meet(range(size))
