"""Two binary trees on p ranks, each for half of n bytes; inner ranks of one are the other's leaves.

So no link idles.
"""

from collections.abc import Callable, Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Recv, Reduce, Round, Send, on, parallel


def _family(node: int, size: int) -> tuple[int | None, list[int]]:
    """Return parent (None for the root) and children of a node in the in-order tree.

    Its even nodes are leaves::

                3
            1       5          the tree over 0 … 6
          0   2   4   6
    """
    low, count, parent = 0, size, None
    while True:
        left = (1 << (count.bit_length() - 1)) - 1
        top, right = low + left, count - left - 1
        if node == top:
            return parent, [*_top(low, left), *_top(top + 1, right)]
        parent = top
        low, count = (low, left) if node < top else (top + 1, right)


def _top(low: int, count: int) -> list[int]:
    return [low + (1 << (count.bit_length() - 1)) - 1] if count else []


def _relatives(node: int, size: int) -> tuple[int | None, list[int]]:
    """Return parent (None for the root) and children of a node; the last node is the root.

    Below the root is the in-order tree over the other nodes.
    """
    inner = size - 1
    if node == inner:
        return None, _top(0, inner)
    parent, children = _family(node, inner)
    return (inner if parent is None else parent), children


def _reduce(node: int, size: int, block: int) -> Iterator[Round]:
    parent, children = _relatives(node, size)
    for child in children:
        yield Reduce(child, block)
    if parent is not None:
        yield Send(parent, block)


def _broadcast(node: int, size: int, block: int) -> Iterator[Round]:
    parent, children = _relatives(node, size)
    if parent is not None:
        yield Recv(parent, block)
    if children:
        yield tuple(Send(child, block) for child in children)


def _both(
    rank: int, size: int, root: int, half: Callable[[int, int, int], Iterator[Round]]
) -> Iterator[Round]:
    """Yield the schedules of both halves of the data, run concurrently, each on its own tree.

    ``half(node, size, block)`` is the schedule of one half, `block`, on a tree whose root is the
    last node: the rank `root`.  In the second tree the other ranks are mirrored (`size` odd) or
    shifted by one (`size` even), so that inner ranks of one tree are leaves of the other.
    """
    node, inner = (rank - root - 1) % size, size - 1  # of the first tree

    def first(node: int) -> int:
        return (root + 1 + node) % size

    def mirrored(node: int) -> int:
        return (root - 1 - node) % size

    def shifted(node: int) -> int:
        return first(node if node == inner else (node + 1) % inner)

    if size % 2:
        second, other = mirrored, (root - 1 - rank) % size
    else:
        second, other = shifted, (node if node == inner else (node - 1) % inner)
    yield parallel(on(first, half(node, size, 0)), on(second, half(other, size, 1)))


def _reduce_and_broadcast(node: int, size: int, block: int) -> Iterator[Round]:
    yield from _reduce(node, size, block)
    yield from _broadcast(node, size, block)


@algorithm("broadcast", "double_binary_tree", blocks=2)
def broadcast_double_binary_tree(rank: int, size: int, *, root: int) -> Iterator[Round]:
    """One half of the data moves down one binary tree, the other half down the other tree.

    Rounds: ceil(lg p).  Bytes per rank: n on inner ranks and the root.
    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan", Parallel Computing 35 (2009).

    5 ranks, root 0::

        0 --> 4 --> 2 --> 1, 3        0 --> 1 --> 3 --> 4, 2
    """
    return _both(rank, size, root, _broadcast)


@algorithm("allreduce", "double_binary_tree", blocks=2)
def allreduce_double_binary_tree(rank: int, size: int) -> Iterator[Round]:
    """Each half of the data is reduced up its own binary tree to rank 0, then broadcast down it.

    Rounds: about 3 lg p.  Bytes per rank: at most 2n.
    Source: Sanders, Speck and Träff, Parallel Computing 35 (2009).

    5 ranks, one tree for each half::

              0                 0
              4                 1
            2                     3
          1   3                 4   2
    """
    return _both(rank, size, 0, _reduce_and_broadcast)
