"""Scans: rank r ends with the combination of ranks 0 … r, or 0 … r-1, in the order of the ranks.

An exclusive scan is an inclusive one of ranks 1 … p-1, after each rank has received the n bytes of
its left neighbour.
"""

from collections.abc import Callable, Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Copy, Fold, Meet, Recv, Reduce, Round, Schedule, Send, on
from .relabel import powers


def _shifted(rank: int, size: int, scan: Callable[[int, int], Schedule]) -> Iterator[Round]:
    """Yield an exclusive scan: every rank's data move one rank to the right, then are scanned.

    On 5 ranks, x1 is rank 1's data::

        out:  rank 0   rank 1   rank 2   rank 3   rank 4
                 -        x0       x1       x2       x3      moved
                 -        x0     x0 x1   x0 … x2  x0 … x3    scanned
    """
    right = [Send(rank + 1, buffer="in")] if rank + 1 < size else []
    left = [Recv(rank - 1)] if rank else []
    if left or right:
        yield (*right, *left)
    if rank:
        yield from on(lambda index: index + 1, scan(rank - 1, size - 1))


@algorithm("scan", "chain", ordered=True)
def scan_chain(rank: int, size: int) -> Iterator[Round]:
    """Every rank adds the left neighbour's result to its data and sends the sum to the right.

    Rounds: 2 on each rank (reduce, send), p-1 messages in turn.  Bytes per rank: n.
    Source: Open MPI, ``coll_base_scan.c`` (linear).

    5 ranks; in segments, all of them work at the same time::

        0 --> 1 --> 2 --> 3 --> 4
    """
    if rank:
        yield Reduce(rank - 1)
    if rank + 1 < size:
        yield Send(rank + 1)


@algorithm("scan", "recursive_doubling", ordered=True)
def scan_recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """In round k, every rank sends its partial result to the rank 2^k to its right, if there is.

    Rounds: ceil(lg p).  Bytes per rank: n in each round, ceil(lg p) n on rank 0.
    Source: Hillis and Steele, "Data parallel algorithms", CACM 29 (1986).

    5 ranks; after each round rank 4, for example, has the combination of ranks 4, 3-4, 1-4, 0-4::

        0 --> 1    0 --> 2    0 --> 4
        1 --> 2    1 --> 3
        2 --> 3    2 --> 4
        3 --> 4
    """
    for distance in powers(size):
        right = [Send(rank + distance)] if rank + distance < size else []
        left = [Reduce(rank - distance)] if rank >= distance else []
        yield (*right, *left)


@algorithm("scan", "binomial", ordered=True)
def scan_binomial(rank: int, size: int) -> Iterator[Round]:
    """Reduce up a binomial tree, then send the prefixes down between its subtrees.

    With the ranks counted from 1, the number k·2d ends a group of 2d ranks.  Up: it adds the sum of
    the group's left half.  Down: it has the sum of all ranks so far, which the number d further on
    needs: that one has the sum of the d ranks in between.

    Rounds: at most 2 ceil(lg p) - 1.  Bytes per rank: at most n lg p, and less than 2n on average.
    Source: Blelloch, "Scans as primitive parallel operations", IEEE ToC 38 (1989).

    5 ranks; two rounds up, and one down::

        0 --> 1    1 --> 3    1 --> 2
        2 --> 3               3 --> 4
    """
    number = rank + 1
    for distance in powers(size):
        if number % (2 * distance) == 0:
            yield Reduce(rank - distance)
        elif number % (2 * distance) == distance and rank + distance < size:
            yield Send(rank + distance)
    for distance in reversed(powers(size)):
        if number % (2 * distance) == 0 and rank + distance < size:
            yield Send(rank + distance)
        elif number % (2 * distance) == distance and number > distance:
            yield Reduce(rank - distance)


@algorithm("exscan", "chain", ordered=True)
def exscan_chain(rank: int, size: int) -> Iterator[Round]:
    """Send the data one rank to the right, then scan them along the chain of ranks 1 … p-1.

    Rounds: 3 on each rank, p-1 messages in turn.  Bytes per rank: 2n.
    Source: Open MPI, ``coll_base_exscan.c`` (linear).

    5 ranks::

        0 --> 1    1 --> 2 --> 3 --> 4
        1 --> 2
        2 --> 3
        3 --> 4
    """
    return _shifted(rank, size, scan_chain)


@algorithm("exscan", "recursive_doubling", ordered=True)
def exscan_recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Send the data one rank to the right, then scan ranks 1 … p-1 by recursive doubling.

    Rounds: 1 + ceil(lg(p-1)).  Bytes per rank: n in each round.
    Source: Hillis and Steele, "Data parallel algorithms", CACM 29 (1986).

    5 ranks::

        0 --> 1    1 --> 2    1 --> 3
        1 --> 2    2 --> 3    2 --> 4
        2 --> 3    3 --> 4
        3 --> 4
    """
    return _shifted(rank, size, scan_recursive_doubling)


@algorithm("exscan", "binomial", ordered=True)
def exscan_binomial(rank: int, size: int) -> Iterator[Round]:
    """Send the data one rank to the right, then scan ranks 1 … p-1 up and down a binomial tree.

    Rounds: at most 2 ceil(lg(p-1)).  Bytes per rank: at most n (1 + lg p), and less than 3n on
    average.
    Source: Blelloch, "Scans as primitive parallel operations", IEEE ToC 38 (1989).

    5 ranks; one round to the right, two up, and one down::

        0 --> 1    1 --> 2    2 --> 4    2 --> 3
        1 --> 2    3 --> 4
        2 --> 3
        3 --> 4
    """
    return _shifted(rank, size, scan_binomial)


@algorithm("scan", "in_place", ordered=True, memory="mapped")
@algorithm("scan", "published", ordered=True, memory="published")
def scan_read(rank: int, size: int) -> Iterator[Round]:
    """Every rank combines the arrays up to its own, aside until the others have read that.

    Rounds: 2 and 2 meetings.  Bytes per rank: at most (p-1) n read.

    Into rank 2 of 5::

        0, 1 --> 2
    """
    return _read(rank, size, rank + 1)


@algorithm("exscan", "in_place", ordered=True, memory="mapped")
@algorithm("exscan", "published", ordered=True, memory="published")
def exscan_read(rank: int, size: int) -> Iterator[Round]:
    """Every rank combines the arrays before its own, aside until the others have read that.

    Rounds: 2 and 2 meetings.  Bytes per rank: at most (p-1) n read.

    Into rank 2 of 5::

        0, 1 --> 2
    """
    return _read(rank, size, rank)


def _read(rank: int, size: int, count: int) -> Iterator[Round]:
    """Yield a scan in shared memory: each rank combines the arrays of the first `count` ranks.

    The result stays in "tmp" until the higher ranks have read this rank's input: a call in place
    has both in one array.
    """
    yield Meet(range(size))
    if count:
        yield Fold(range(count), target="tmp")
    yield Meet(range(size), awaits=range(rank + 1, size))
    if count:
        yield Copy(0, 0, source="tmp")
