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
    """The parts of a communicator that its executors of host arrays use."""

    backend: Backend
    heap: Heap | None  # of the ranks of this node; None if they share no memory
    apart: str | None  # why there is no symmetric memory of all ranks; None if there is
    groups: Groups  # the ranks of each node, as the configuration counts nodes
    pipelining: Segmentation
    arity: int  # children of a node in trees
    # check_same(sequence, operation, fingerprint) raises CollectiveMismatch if a rank of this node
    # has announced another operation of that number.
    check_same: Callable[[int, str, int], object]
    # mismatch(sequence, operation, others) returns the error for ranks that run another operation;
    # `others` has the text of theirs by rank.
    mismatch: Callable[[int, str, dict[int, str]], CollectiveMismatch]
