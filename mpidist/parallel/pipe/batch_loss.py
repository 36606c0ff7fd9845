"""The loss of a batch from those of its microbatches: the mean over all that counts in it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from ...errors import InvalidArgument
from ..framework import library
from .loss import MicrobatchLoss, is_sum
from .microbatches import cut
from .structure import flatten, is_tensor

LOSSES = {"torch": "mpidist.torch.losses"}
"""What is known of a library's loss functions: a module with ``known`` and ``watched``."""


class BatchLoss:
    """How much each microbatch's loss weighs in the mean over the batch.

    Parameters
    ----------
    function : callable
        ``function(output, target)`` gives the mean over the rows of a microbatch; their sum if its
        ``reduction`` is "sum".
    target : tensor or structure of tensors
        Of the whole batch.
    microbatches : int
        How many.
    rank : int
        For error messages.
    count : callable or None
        ``count(target)`` gives over how much the function's mean goes, if not over the rows.
    """

    def __init__(self, function: Any, target: Any, microbatches: int, rank: int, count: Any):
        if target is None:
            raise InvalidArgument(f"rank {rank}: target=None: rank {rank} must provide the target")
        self.targets, self._rows = cut(target, microbatches, rank, "target")
        self.rank, self._sums, self._function = rank, is_sum(function, rank), function
        self._watched: Callable | None = None
        self.counts: list[float] = [*self._rows]
        name = library(flatten(target)[1][0])
        if count is not None:
            self.counts = [_checked(count, t, rank) for t in self.targets]
        elif name in LOSSES:
            self._ask(importlib.import_module(LOSSES[name]))
        self.total = sum(self.counts)

    def _ask(self, losses: Any) -> None:
        """Take what is known of the function, or have an eye on what it calls."""
        plain = is_tensor(self.targets[0]) and not self._sums
        known = losses.known(self._function) if plain else None
        if known is None:
            self._watched = losses.watched(self._function, self._sums, self.rank)
            return
        counts = [known.count(t) for t in self.targets]
        if None not in counts:
            self._function, self._sums, self.counts = known.function, known.sums, counts

    def of(self, microbatch: int, rows: int) -> MicrobatchLoss:
        """Give the loss of a microbatch that has so many rows.

        `total` may have been replaced by the mean over the replicas.
        """
        own = self._rows[microbatch]
        if rows != own:
            raise InvalidArgument(
                f"rank {self.rank}: target has {own} rows in microbatch {microbatch}: allowed are "
                f"the {rows} of the input"
            )
        part = 1.0 if self._sums else self.counts[microbatch]
        weight = part / self.total if self.total else math.nan
        target = self.targets[microbatch]
        return MicrobatchLoss(self._function, target, weight, self.rank, self._watched)


def _checked(count: Any, target: Any, rank: int) -> float:
    if not callable(count):
        raise InvalidArgument(
            f"rank {rank}: count={count!r}: allowed are functions of a microbatch's target"
        )
    found = count(target)
    number = float(found) if hasattr(found, "shape") or isinstance(found, Real) else math.nan
    if not 0 <= number < math.inf:
        raise InvalidArgument(f"rank {rank}: count gave {found!r}: allowed are numbers >= 0")
    return number
