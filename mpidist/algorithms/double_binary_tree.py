"""Two binary trees on p ranks, each for half of n bytes; inner ranks of one are the other's leaves.

So no link idles.
"""

from collections.abc import Callable, Iterator

from ..schedule.ranks import choose
from ..schedule.registry import algorithm
from ..schedule.rounds import Recv, Reduce, Round, Send, on, parallel


def _family(node: int, size: int) -> tuple[int | None, list[int]]:
    """Return parent (None for the root) and children of a node in the in-order tree.

    Its even nodes are leaves::

                3
            1       5          the tree over 0 … 6
          0   2   4   6
    """
    half = 1  # of the numbers of a subtree of its height: that of 5 (101 in binary) is 4 … 6
    while node & half:
        half *= 2
    step = half // 2
    children = [node - step] if step else []
    while step and node + step >= size:
        step //= 2
    if step:
        children.append(node + step)
    if node == _top(size):
        return None, children
    # Ancestors beyond the last node do not exist; the next one takes their place.
    parent = choose(node & 2 * half, node - half, node + half)
    while parent >= size:
        half *= 2
        parent = choose(parent & 2 * half, parent - half, parent + half)
    return parent, children


def _top(size: int) -> int:
    """Return the root of the in-order tree over 0 … size - 1."""
    return (1 << (size.bit_length() - 1)) - 1


def _relatives(node: int, size: int) -> tuple[int | None, list[int]]:
    """Return parent (None for the root) and children of a node; the last node is the root.

    Below the root is the in-order tree over the other nodes.
    """
    inner = size - 1
    if node == inner:
        return None, [_top(inner)] if inner else []
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
