"""The binomial tree: with each round twice as many of the p ranks have the n bytes of data."""

from collections.abc import Callable, Iterator
from functools import partial

from ..schedule.ranks import span
from ..schedule.registry import algorithm
from ..schedule.rounds import Blocks, Recv, Reduce, Round, Send
from .relabel import powers, turned

Part = Callable[[int, int], Blocks]  # the blocks of a subtree, by its first rank and its end


def _block_0(first: int, stop: int) -> Blocks:
    return 0


def _up(
    rank: int, size: int, arrive: type[Reduce] | type[Recv] = Reduce, part: Part = _block_0
) -> Iterator[Round]:
    """Yield one rank's reduce or gather (`arrive`) up the tree to rank 0, small subtrees first."""
    for distance in powers(size):
        if rank & distance:
            yield Send(rank - distance, part(rank, min(rank + distance, size)))
            return
        child = rank + distance
        if child < size:
            yield arrive(child, part(child, min(child + distance, size)))


def _down(rank: int, size: int, part: Part = _block_0) -> Iterator[Round]:
    """Yield one rank's broadcast or scatter down the tree from rank 0, large subtrees first."""
    for distance in reversed(powers(size)):
        child = rank + distance
        if rank % (2 * distance) == distance:
            yield Recv(rank - distance, part(rank, min(child, size)))
        elif rank % (2 * distance) == 0 and child < size:
            yield Send(child, part(child, min(child + distance, size)))


@algorithm("reduce", "binomial")
def reduce_binomial(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """In round k, ranks at an odd multiple of 2^k from the root send to the rank 2^k nearer to it.

    Rounds: ceil(lg p).  Bytes per rank: n.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, root 0, the numbers are rounds::

        1 -1-> 0    3 -1-> 2 -2-> 0    4 -3-> 0
    """
    return turned(rank, size, root, _up)


@algorithm("broadcast", "binomial")
def broadcast_binomial(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """In each round, every rank that has the data sends them to one rank that has not.

    Rounds: ceil(lg p).  Bytes per rank: n lg p on the root, less elsewhere.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, root 0, the numbers are rounds::

        0 -1-> 4    0 -2-> 2 -3-> 3    0 -3-> 1
    """
    return turned(rank, size, root, _down)


@algorithm("allreduce", "binomial", ordered=True, tree=True)
def allreduce_binomial(rank: int, size: int) -> Iterator[Round]:
    """Reduce along a binomial tree to rank 0, then broadcast along the same tree.

    Rounds: 2 ceil(lg p).  Bytes per rank: at most n (1 + lg p).
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks::

        1 --> 0    3 --> 2 --> 0    4 --> 0    then back the same way
    """
    yield from _up(rank, size)
    yield from _down(rank, size)


@algorithm("gather", "binomial")
def gather_binomial(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Every rank gathers the blocks of its subtree and sends them to its parent as one message.

    Rounds: ceil(lg p).  Bytes per rank: the blocks of its subtree, at most n/2.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, root 0, with the blocks that move::

        1 -[1]-> 0    3 -[3]-> 2 -[2,3]-> 0    4 -[4]-> 0
    """
    return turned(rank, size, root, partial(_up, arrive=Recv, part=span), blocks=True)


@algorithm("scatter", "binomial")
def scatter_binomial(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Every rank receives its subtree's blocks as one message and sends its children theirs.

    Rounds: ceil(lg p).  Bytes per rank: (p-1)/p n on the root, 0 on a leaf.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, root 0, with the blocks that move::

        0 -[4]-> 4    0 -[2,3]-> 2 -[3]-> 3    0 -[1]-> 1
    """
    return turned(rank, size, root, partial(_down, part=span), blocks=True)
