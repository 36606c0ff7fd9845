"""The loss of the last stage: of microbatches or of the whole batch, and its weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from ..frameworks.base import adapter, library
from .microbatches import cut
from .values import flatten, is_tensor, unflatten

REDUCTIONS = {"mean": False, "batchmean": False, "sum": True}
"""What a loss function may say that it gives, and whether it is a sum."""


def is_sum(function: Any, rank: int) -> bool:
    """Tell whether a loss function says that it gives a sum.

    Raises
    ------
    InvalidArgument
        If it is no function, or says something else than a mean.
    """
    if not callable(function):
        raise InvalidArgument(
            f"rank {rank}: loss_fn={function!r}: allowed are functions of output and target"
        )
    said = getattr(function, "reduction", "mean")
    if isinstance(function, partial):
        given = function.keywords
        old = sorted({"reduce", "size_average"}.intersection(given))
        if old:
            raise InvalidArgument(
                f"rank {rank}: loss_fn has {old[0]}={given[old[0]]!r}: reduction= is allowed"
            )
        said = given.get("reduction", getattr(function.func, "reduction", "mean"))
    if said not in REDUCTIONS:
        allowed = ", ".join(map(repr, REDUCTIONS))
        raise InvalidArgument(f"rank {rank}: loss_fn has reduction={said!r}: allowed are {allowed}")
    return REDUCTIONS[said]


class MicrobatchLoss:
    """A microbatch's part of the loss.

    Parameters
    ----------
    function : callable
        The loss function.
    target : tensor or structure of tensors
        The microbatch's.
    weight : float
        Of what the function gives.  At 0 it is not called, as the mean over nothing is no number.
    rank : int
        For error messages.
    watched : callable
        ``watched(function, output, target)`` calls it.
    """

    __slots__ = ("_function", "_target", "weight", "_rank", "_call")

    def __init__(
        self, function: Any, target: Any, weight: float, rank: int, watched: Callable | None = None
    ):
        self._function, self._target, self.weight, self._rank = function, target, weight, rank
        self._call = function if watched is None else partial(watched, function)

    def given(self) -> list[Any]:
        """List the tensors that were there before: the target's, and the function's own."""
        own = getattr(self._function, "buffers", None)
        return [*flatten(self._target)[1], *(own() if callable(own) else ())]

    def value(self, output: Any) -> float:
        """Give the number."""
        if not self.weight:
            return 0.0
        found = self._call(output, self._target)
        return self.weight * float(found[0] if type(found) is tuple else found)

    def tensor(self, output: Any) -> Any:
        """Give the weighted loss as a tensor from which autograd goes back."""
        if self.weight:
            found = self._call(output, self._target)
        else:
            found = sum(x.flatten()[:0].sum() for x in flatten(output)[1])
        if not is_tensor(found) or tuple(found.shape) not in ((), (1,)):
            what = f"shape {tuple(found.shape)}" if is_tensor(found) else type(found).__name__
            raise InvalidArgument(
                f"rank {self._rank}: loss_fn gave {what}: allowed is one number, as a tensor"
            )
        if not found.requires_grad:
            raise InvalidArgument(
                f"rank {self._rank}: loss_fn gave a loss without a graph, so that no parameter "
                "gets a gradient: allowed are losses that PyTorch computes from the output, "
                "neither detached nor within no_grad(), of a model in which something requires a "
                "gradient; forward() evaluates a model"
            )
        return found * self.weight

    def explicit(self, output: Any) -> tuple[float, Any]:
        """Give the number, and the gradient with respect to the output."""
        function = self._function
        if not self.weight:
            tree, given = flatten(output)
            zeros = [np.zeros_like(x) if x.dtype.kind in "fcV" else None for x in given]
            return 0.0, unflatten(tree, zeros, plain=False)
        found = self._call(output, self._target)
        back = getattr(function, "backward", None)
        if back is not None:
            return self.weight * float(found), back(self.weight)
        if type(found) is tuple and len(found) == 2:
            tree, grads = flatten(found[1])
            scaled = [grad * self.weight for grad in grads]
            return self.weight * float(found[0]), unflatten(tree, scaled)
        raise InvalidArgument(
            f"rank {self._rank}: loss_fn={function!r} has no backward(scale) and did not give "
            "(loss, gradient): without autograd, one of these is needed"
        )


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
        losses = adapter(library(flatten(target)[1][0]), "loss")
        if count is not None:
            self.counts = [_checked(count, t, rank) for t in self.targets]
        elif losses is not None:
            self._ask(losses)
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
