"""The k-ary tree on p ranks, messages of n bytes: rank r has the children k r + 1 … k r + k.

k is the argument `arity`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..schedule.registry import algorithm
from ..schedule.rounds import Recv, Reduce, Round, Send
from .relabel import turned


@dataclass(frozen=True)
class Role:
    """The role of a rank in a tree: root, internal or leaf, and its number of children."""

    kind: Literal["root", "internal", "leaf"]
    num_children: int


def role(rank: int, size: int, arity: int) -> Role:
    """Return the role of a rank in the k-ary tree whose root is rank 0."""
    num_children = len(child_ranks(rank, size, arity))
    if rank == 0:
        return Role("root", num_children)
    return Role("internal" if num_children else "leaf", num_children)


def parent_rank(rank: int, arity: int) -> int | None:
    """Return the parent of a rank, or None for rank 0."""
    return (rank - 1) // arity if rank else None


def child_ranks(rank: int, size: int, arity: int) -> list[int]:
    """Return the children of a rank, in ascending order."""
    children = [rank * arity + 1 + i for i in range(arity)]
    return [child for child in children if child < size]


def _reduce(rank: int, size: int, arity: int) -> Iterator[Round]:
    for child in child_ranks(rank, size, arity):
        yield Reduce(child)
    if rank:
        yield Send((rank - 1) // arity)


def _broadcast(rank: int, size: int, arity: int) -> Iterator[Round]:
    if rank:
        yield Recv((rank - 1) // arity)
    children = child_ranks(rank, size, arity)
    if children:
        yield tuple(Send(child) for child in children)


@algorithm("reduce", "tree")
def reduce_tree(rank: int, size: int, *, root: int, arity: int) -> Iterator[Round]:
    """Every rank combines its children's data one by one, then sends the sum to its parent.

    Rounds: about k log_k p.  Bytes per rank: n.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, arity 2, root 0::

        3, 4 --> 1 --> 0
                 2 --> 0
    """
    return turned(rank, size, root, partial(_reduce, arity=arity))


@algorithm("broadcast", "tree")
def broadcast_tree(rank: int, size: int, *, root: int, arity: int) -> Iterator[Round]:
    """Every rank receives the data from its parent, then sends them to all its children.

    Rounds: about log_k p.  Bytes per rank: k n for a rank with k children, 0 for a leaf.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, arity 2, root 0::

        0 --> 1 --> 3, 4
        0 --> 2
    """
    return turned(rank, size, root, partial(_broadcast, arity=arity))


@algorithm("allreduce", "tree")
def allreduce_tree(rank: int, size: int, *, arity: int) -> Iterator[Round]:
    """Reduce up the tree to rank 0, then broadcast down the same tree.

    Rounds: about (k+1) log_k p.  Bytes per rank: (k+1) n for a rank with k children, n for a leaf.
    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).

    5 ranks, arity 2::

        3, 4 --> 1 --> 0 --> 1 --> 3, 4
                 2 --> 0 --> 2
    """
    yield from _reduce(rank, size, arity)
    yield from _broadcast(rank, size, arity)


@algorithm("barrier", "tree")
def barrier_tree(rank: int, size: int, *, arity: int) -> Iterator[Round]:
    """Every rank notifies its parent when its subtree has arrived; the root's answer comes down.

    Rounds: about (k+1) log_k p.  Bytes per rank: empty messages, k+1 of them for a rank
    with k children.
    Source: Mellor-Crummey and Scott, "Algorithms for scalable synchronization on shared-memory
    multiprocessors", TOCS 9 (1991).

    5 ranks, arity 2::

        3, 4 --> 1 --> 0 --> 1 --> 3, 4
                 2 --> 0 --> 2
    """
    yield from allreduce_tree(rank, size, arity=arity)
