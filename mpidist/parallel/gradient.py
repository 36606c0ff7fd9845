"""The record of one gradient: whose value it has, from a forward to the mean over the ranks."""

from __future__ import annotations

from enum import Enum
from typing import Any


class State(Enum):
    """Whose value a gradient has."""

    RECEIVED = "received"
    EMPTY = "empty"
    ADDED = "added"
    SENT = "sent"


RECEIVED, EMPTY, ADDED, SENT = State


class Gradient:
    """A gradient in the course of a step: read by all of parallel/, changed by reducer and buckets.

    ::

                 a forward finds None             backward adds,
                 and gives a zeroed view          or the user assigns
        received ──────────────────────► empty ───────────────────────► added
         ▲  │ │                            │                             ▲ │
         │  │ └───── it was not None ──────┼─────────────────────────────┘ │ its value is sent
         │  │                              └──── zeros are sent ────────┐  │
         │  └───── it is sent as it is ──────────────────────────────┐  │  │
         │                                                           ▼  ▼  ▼
         └─ the mean of all ranks, or None if it is empty on all ───── sent

    `received` is the first state, too: the ranks begin with nothing that has to be averaged.
    """

    __slots__ = ("bucket", "changes", "count", "expected", "index", "name", "nbytes", "order",
                 "parameter", "reports", "sparse", "state", "view")  # fmt: skip

    def __init__(self, index: int, name: str, parameter: Any, nbytes: int, sparse: bool):
        self.index, self.name, self.parameter = index, name, parameter
        self.nbytes, self.sparse = nbytes, sparse
        self.bucket: int | None = None  # its number, not the bucket: no cycle holds the memory
        self.view: Any = None  # what the gradient is after a sync; of a sparse one the last mean
        self.changes: int | None = None  # of its view before a backward pass, with microbatches
        self.reports = True  # whether its library calls back at each addition
        self.state = RECEIVED
        # Additions to be averaged in this step, when the first came, and how many are the last.
        self.count = self.order = self.expected = 0

    @property
    def final(self) -> bool:
        """Whether it has had all additions of a step, as in the first one; False if unknown."""
        return 0 < self.expected == self.count

    @property
    def own(self) -> bool:
        """Whether this rank has added to it, and the mean has not been received."""
        return self.state is ADDED or self.state is SENT

    def was_set(self) -> bool:
        """Return whether the user set it: assigned it, or changed its zeroed view."""
        grad = self.parameter.grad
        if grad is None or grad is not self.view:
            return grad is not None
        return self.state is EMPTY and bool((grad != 0).any())
