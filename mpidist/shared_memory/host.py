"""What the executors of host arrays are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..backends.base import Backend
from ..errors import CollectiveMismatch
from ..schedule.registry import Groups
from ..selection.segmentation import Segmentation
from .heap import Heap


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of a communicator that its executors of host arrays use.

    Attributes
    ----------
    heap : Heap or None
        Symmetric memory of the ranks of this node; None if they share no memory.
    apart : str or None
        Why there is no symmetric memory of all ranks; None if there is.
    groups : tuple of tuple of int
        The ranks of each node, as the configuration counts nodes.
    arity : int
        Number of children of a node in trees.
    check_same : callable
        ``check_same(sequence, operation, fingerprint)`` raises CollectiveMismatch if a rank of this
        node has announced another operation of that number.
    mismatch : callable
        ``mismatch(sequence, operation, others)`` returns the error for ranks that run another one;
        `others` has the text of theirs by rank.
    """

    backend: Backend
    heap: Heap | None
    apart: str | None
    groups: Groups
    pipelining: Segmentation
    arity: int
    check_same: Callable[[int, str, int], object]
    mismatch: Callable[[int, str, dict[int, str]], CollectiveMismatch]
