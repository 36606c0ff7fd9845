"""In place: the ranks of a node read and write each other's arrays, p ranks and n bytes.

All ranks meet before the first access and after the last one.  Every reduction combines in the
order of ``direct``, so it has the same bits.  Those that only read are in published.py and
scan.py.
"""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Copy, Fold, Get, Meet, Put, Round
from .relabel import inward, onward, whole_fold


@algorithm(
    "allreduce", "in_place", blocks=lambda size: size, ordered=True, memory="mapped", at_once=True
)
def allreduce_in_place(rank: int, size: int) -> Iterator[Round]:
    """Rank d combines block d of all arrays, then stores it in all of them.

    Rounds: 2 between 2 meetings.  Bytes per rank: (p-1)/p n read, as much stored: the lower bound.

    Block 2 on 5 ranks, combined by rank 2::

        0, 1, 3, 4 --> 2 --> 0, 1, 3, 4
    """
    yield Meet(range(size))
    yield Fold(inward(rank, size), blocks=rank)
    yield tuple(Put(peer, blocks=rank) for peer in onward(rank, size))
    yield Meet(range(size))


@algorithm(
    "reduce", "in_place", blocks=lambda size: size, ordered=True, memory="mapped", at_once=True
)
def reduce_in_place(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Rank d combines block d of all arrays, then stores it in the root's result.

    Rounds: 2 between 2 meetings.  Bytes per rank: (p-1)/p n read and n/p stored.

    Block 2 on 5 ranks, root 0::

        0, 1, 3, 4 --> 2 --> 0
    """
    yield Meet(range(size))
    yield Fold(inward(rank, size), blocks=rank, target="out" if rank == root else "tmp")
    if rank != root:
        yield Put(root, blocks=rank, source="tmp")
    yield Meet(range(size))


@algorithm(
    "reduce",
    "in_place_fetched",
    blocks=lambda size: size,
    ordered=True,
    memory="mapped",
    at_once=True,
)
def reduce_in_place_fetched(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Rank d combines block d of all arrays beside the root's, which copies it into its result.

    Rounds: 2 between 2 meetings, 1 after them.  Bytes per rank: (p-1)/p n read and n/p stored.

    It is for a result that only the root reaches.  Block 2 on 5 ranks, root 0::

        0, 1, 3, 4 --> 2 --> 0
    """
    yield Meet(range(size))
    yield Fold(inward(rank, size), blocks=rank, target="out" if rank == root else "tmp")
    if rank != root:
        yield Put(root, blocks=rank, source="tmp", target="tmp")
    yield Meet(range(size))
    if rank == root:
        others = tuple(onward(rank, size))
        yield Copy(others, others, source="tmp")


@algorithm(
    "reduce",
    "in_place_one_shot",
    blocks=lambda size: size,
    ordered=True,
    memory="mapped",
    at_once=True,
)
def reduce_in_place_one_shot(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """The root combines all arrays, each block in the order of its owner.

    Rounds: 1 between 2 meetings.  Bytes per rank: (p-1) n read by the root.

    5 ranks, root 0::

        1, 2, 3, 4 --> 0
    """
    yield Meet(range(size))
    if rank == root:
        yield whole_fold(size)
    yield Meet(range(size))


@algorithm("allgather", "in_place", memory="mapped")
def allgather_in_place(rank: int, size: int) -> Iterator[Round]:
    """Every rank stores its block in all arrays.

    Rounds: 1 between 2 meetings.  Bytes per rank: (p-1)/p n stored.

    Block 2 on 5 ranks::

        2 --> 0, 1, 3, 4
    """
    yield Meet(range(size))
    yield (Copy(rank, rank), *(Put(peer, blocks=rank, source="in") for peer in onward(rank, size)))
    yield Meet(range(size))


@algorithm("broadcast", "in_place", blocks=lambda size: size, memory="mapped")
def broadcast_in_place(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """The others fetch all blocks but the last from the root, which stores the last one.

    So the root copies as much as each of the others.

    Rounds: 1 between 2 meetings.  Bytes per rank: (p-1)/p n read, or stored by the root.

    5 ranks, root 0::

        0 <-[0-3]- 1, 2, 3, 4     0 -[4]-> 1, 2, 3, 4
    """
    every, last = range(size), size - 1
    if rank == root:
        yield Copy(every, every)
    yield Meet(every)
    if rank == root:
        yield tuple(Put(peer, blocks=last) for peer in onward(rank, size))
    else:
        yield Get(root, blocks=range(last))
    yield Meet(every)


@algorithm("gather", "in_place", memory="mapped")
def gather_in_place(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Every rank stores its block in the root's result, and waits for no other rank afterwards.

    Rounds: 1 between 2 meetings.  Bytes per rank: n/p stored.

    5 ranks, root 0::

        1, 2, 3, 4 --> 0
    """
    yield Meet(range(size))
    yield Copy(rank, rank) if rank == root else Put(root, blocks=rank, source="in")
    yield Meet(range(size), awaits=None if rank == root else ())


@algorithm("scatter", "in_place_stored", memory="mapped")
def scatter_in_place_stored(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """The root stores every block in the result of its rank, for an array that only it reaches.

    Rounds: 1 between 2 meetings.  Bytes per rank: (p-1)/p n stored by the root.

    5 ranks, root 0::

        0 --> 1, 2, 3, 4
    """
    yield Meet(range(size))
    if rank == root:
        stored = (Put(peer, blocks=peer, source="in") for peer in onward(rank, size))
        yield (Copy(rank, rank), *stored)
    yield Meet(range(size), awaits=() if rank == root else (root,))
