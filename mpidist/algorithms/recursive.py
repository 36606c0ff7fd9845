"""Recursive doubling and halving of n bytes on p ranks; any p, by folding onto a power of two.

Also algorithms composed of them.  Folding: each rank outside the power of two, an *extra*, gives
its data to a *proxy*, which acts for both.
"""

from collections.abc import Callable, Iterator

from ..schedule.ranks import choose, span
from ..schedule.registry import algorithm
from ..schedule.rounds import Blocks, Recv, Reduce, Round, Send
from .binomial import gather_binomial, scatter_binomial
from .folding import Folding, base
from .relabel import powers, sparing
from .ring import allgather_ring


def _exchange(rank: int, size: int) -> Iterator[Round]:
    """Yield an allreduce by recursive doubling, on a power of two of ranks.

    The rank exchanges its whole partial result with the ranks at distance 1, 2, 4, … in turn.
    """
    for distance in powers(size):
        yield Send(rank ^ distance), Reduce(rank ^ distance)


def _halves(rank: int, size: int, nearest_first: bool) -> list[tuple[int, Blocks, Blocks]]:
    """Return (partner, blocks kept, blocks sent) for each round of recursive halving.

    Partners are at distance 1, 2, 4, … if `nearest_first`, else in the reverse order.
    """
    first, half = 0, size
    rounds: list[tuple[int, Blocks, Blocks]] = []
    distances = powers(size) if nearest_first else powers(size)[::-1]
    for distance in distances:
        half //= 2
        lower, upper = first, first + half
        kept = choose(rank & distance, upper, lower)
        given = choose(rank & distance, lower, upper)
        rounds.append((rank ^ distance, span(kept, kept + half), span(given, given + half)))
        first = kept
    return rounds


def _halve(rank: int, size: int, nearest_first: bool = False) -> Iterator[Round]:
    """Yield a reduce-scatter by recursive halving, on a power of two of ranks.

    Rank r ends with block r; with `nearest_first`, with the block of r's bits in reverse order.
    """
    for partner, kept, given in _halves(rank, size, nearest_first):
        yield Send(partner, given), Reduce(partner, kept)


def _unhalve(rank: int, size: int, nearest_first: bool = False) -> Iterator[Round]:
    """Yield an allgather on a power of two of ranks: the rounds of :func:`_halve` in reverse."""
    for partner, kept, given in reversed(_halves(rank, size, nearest_first)):
        yield Send(partner, kept), Recv(partner, given)


def _halve_and_back(rank: int, size: int) -> Iterator[Round]:
    """Yield an allreduce on a power of two of ranks: :func:`_halve`, then :func:`_unhalve`.

    The nearest partner comes first, which keeps operands in rank order.
    """
    yield from _halve(rank, size, nearest_first=True)
    yield from _unhalve(rank, size, nearest_first=True)


def _all(count: int) -> Callable[[int], range]:
    """Return the function of a rank, for `Folding.through`, that returns all block numbers."""
    return lambda rank: range(count)


def _keeps_tree(size: int) -> bool:
    """Return whether folding keeps the fixed tree: of 6 ranks ((0 1) (2 3)) (4 5), not of 5.

    So it is where the number of ranks has no 0 before a 1, in binary: 4, 6, 7, 8, 12, 14, 15, 16.
    """
    above = size + (size & -size)
    return above & (above - 1) == 0


@algorithm("allreduce", "recursive_doubling", ordered=True, tree=_keeps_tree)
def allreduce_recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """In round k, ranks at distance 2^k exchange their partial sums.

    Rounds: lg p for a power of two, else floor(lg p) + 2.  Bytes per rank: n each round.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks: 1 to 4 exchange, and 1 (a proxy) acts for 0 (an extra) too::

        0 --> 1    1 <-> 2    1 <-> 3    1 --> 0
                   3 <-> 4    2 <-> 4
    """
    everything = _all(1)
    return Folding(rank, size).through(_exchange, Reduce, everything, everything)


@algorithm("allreduce", "rabenseifner", blocks=base, ordered=True, tree=_keeps_tree)
def allreduce_rabenseifner(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter by recursive halving, then allgather by recursive doubling.

    Rounds: 2 lg p for a power of two, else 2 floor(lg p) + 2.  Bytes per rank: 2(p-1)/p n, and up
    to n more where p is no power of two.
    Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.

    5 ranks, the share of the data that moves: 1 to 4 exchange, 1 (a proxy) acts for 0 (an extra)::

        0 -all-> 1    1 <-1/2-> 2    1 <-1/4-> 3    and back    1 -all-> 0
                      3 <-1/2-> 4    2 <-1/4-> 4
    """
    everything = _all(base(size))
    return Folding(rank, size).through(_halve_and_back, Reduce, everything, everything)


@algorithm("reduce_scatter", "recursive_halving")
def reduce_scatter_recursive_halving(rank: int, size: int) -> Iterator[Round]:
    """Partners at halved distances each send the half of their blocks that the other reduces.

    Rounds: lg p for a power of two, else floor(lg p) + 2.  Bytes per rank: (p-1)/p n, and n for
    an extra.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks: 1 to 4 exchange; 1 (a proxy) acts for 0 (an extra) too and sends block 0 back::

        0 -all-> 1    1 <-> 3    1 <-> 2    1 -[0]-> 0
                      2 <-> 4    3 <-> 4
    """
    folded = Folding(rank, size)
    return folded.through(_halve, Reduce, _all(size), lambda extra: extra, folded.covered)


@algorithm("allgather", "recursive_doubling")
def allgather_recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """In round k, ranks at distance 2^k exchange all the blocks that they have.

    Rounds: lg p for a power of two, else floor(lg p) + 2.  Bytes per rank: (p-1)/p n, and up to
    4/3 n more where p is no power of two.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks: 1 to 4 exchange, and 1 (a proxy) acts for 0 (an extra) too::

        0 --> 1    1 <-> 2    1 <-> 3    1 --> 0
                   3 <-> 4    2 <-> 4
    """
    folded = Folding(rank, size)

    def others(extra: int) -> tuple[int, ...]:
        return tuple(choose(i < extra, i, i + 1) for i in range(size - 1))

    return folded.through(_unhalve, Recv, lambda extra: extra, others, folded.covered)


@algorithm("reduce", "reduce_scatter_gather", blocks=base)
def reduce_reduce_scatter_gather(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Reduce-scatter by recursive halving, then gather the blocks along a binomial tree.

    Rounds: 2 lg p for a power of two, else 2 floor(lg p) + 1.  Bytes per rank: at most 3/2 n.
    Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.

    5 ranks, root 0: all but 1 exchange, and 0 (a proxy) acts for 1 (an extra) too::

        1 -all-> 0    0 <-> 3    0 <-> 2    2 --> 0    3 --> 0
                      2 <-> 4    3 <-> 4    4 --> 3
    """
    folded = Folding(rank, size, keep=root)
    top = folded.index(root)

    def halve_and_gather(index: int, count: int) -> Iterator[Round]:
        yield from _halve(index, count)
        yield from gather_binomial(index, count, root=top)

    return folded.through(halve_and_gather, Reduce, _all(base(size)), None)


@algorithm("broadcast", "scatter_allgather", blocks=lambda size: size)
def broadcast_scatter_allgather(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """Scatter the blocks along a binomial tree, then allgather them along a ring.

    Rounds: ceil(lg p) + p-1.  Bytes per rank: 2(p-1)/p n on the root, less elsewhere.
    Source: Barnett et al., "Interprocessor collective communication library (InterCom)", SHPCC
    1994.

    5 ranks, root 0::

        0 -[4]-> 4    0 -[2,3]-> 2 -[3]-> 3    0 -[1]-> 1    then the ring
    """
    yield from scatter_binomial(rank, size, root=root)
    yield from sparing(root, rank, allgather_ring(rank, size))
