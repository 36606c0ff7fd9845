"""The loss: the last stage's microbatch losses, weighted to add up to the batch's loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from ..arguments import function as check_function
from ..arguments import one_of
from ..errors import InvalidArgument
from ..frameworks.base import adapter, library
from .microbatches import cut
from .values import flatten, is_tensor, unflatten

REDUCTIONS = {"mean": False, "batchmean": False, "sum": True}
"""The reductions that a loss function may declare, and whether each is a sum."""

DIFFERENTIABLE = "fcV"
"""Kinds of numpy dtypes that have gradients: floating, complex, and V, as ml_dtypes' bfloat16."""


def declared(function: Any, name: str) -> Any:
    """Return the value that a loss function declares for `name`, such as "reduction", or None.

    Looked up in this order: keywords of a :class:`functools.partial`, attributes, defaults of
    parameters.
    """
    if isinstance(function, partial):
        return function.keywords.get(name, declared(function.func, name))
    if hasattr(function, name):
        return getattr(function, name)
    try:
        parameter = inspect.signature(function).parameters[name]
    except (TypeError, ValueError, KeyError):
        return None
    return None if parameter.default is parameter.empty else parameter.default


def is_sum(function: Any, reduction: Any, rank: int) -> bool:
    """Return whether a loss function computes a sum over rows, and not a mean.

    Nothing is guessed: the function declares it, or `reduction` says so; InvalidArgument if neither
    does, or they contradict each other.
    """
    where = f"rank {rank}: loss_fn"
    check_function("loss_fn", function, "output and target", f"rank {rank}: ")
    keywords = function.keywords if isinstance(function, partial) else {}
    for old in ("reduce", "size_average"):
        if old in keywords:
            raise InvalidArgument(f"{where} has {old}={keywords[old]!r}: use reduction=")
    if reduction is not None:
        one_of("reduction", reduction, ("mean", "sum"), f"rank {rank}: ")
    own = declared(function, "reduction")
    if own is None and reduction is None:
        raise InvalidArgument(
            f"{where}={function!r} does not say whether it computes the mean over the rows of a "
            "microbatch or their sum: expected step(…, reduction='mean') or 'sum', or an "
            "attribute loss_fn.reduction"
        )
    if own is not None and own not in REDUCTIONS:
        expected = ", ".join(map(repr, REDUCTIONS))
        raise InvalidArgument(f"{where} has reduction={own!r}: expected one of {expected}")
    if own is not None and reduction is not None and REDUCTIONS[own] != REDUCTIONS[reduction]:
        raise InvalidArgument(
            f"rank {rank}: reduction={reduction!r}, and loss_fn has reduction={own!r}: expected "
            "the same"
        )
    return REDUCTIONS[reduction or own]


class MicrobatchLoss:
    """The part of a batch's loss of one microbatch: `weight` times the function's result.

    With weight 0 the function is not called: the mean over no rows would be NaN.
    """

    __slots__ = ("_function", "_target", "weight", "_rank")

    def __init__(self, function: Any, target: Any, weight: float, rank: int):
        self._function, self._target, self.weight, self._rank = function, target, weight, rank

    def tensor(self, output: Any) -> Any:
        """Return the weighted loss as a PyTorch tensor, from which autograd runs backward."""
        if self.weight:
            found = self._function(output, self._target)
        else:
            # Zero, but with a graph: backward must reach the parameters, as on other microbatches.
            found = sum(x.flatten()[:0].sum() for x in flatten(output)[1])
        if not is_tensor(found) or tuple(found.shape) not in ((), (1,)):
            what = f"shape {tuple(found.shape)}" if is_tensor(found) else type(found).__name__
            raise InvalidArgument(
                f"rank {self._rank}: loss_fn returned {what}: expected one number, as a tensor"
            )
        if not found.requires_grad:
            raise InvalidArgument(
                f"rank {self._rank}: loss_fn returned a loss without a graph, so no parameter "
                "would get a gradient: expected a loss that PyTorch computes from the output, "
                "not detached and not within no_grad(), of a model in which something requires a "
                "gradient; to evaluate a model, call forward()"
            )
        return found * self.weight

    def loss_and_gradient(self, output: Any) -> tuple[float, Any]:
        """Return the weighted loss and its gradient with respect to the output, without autograd.

        They come from ``function.backward(weight)``, or from a pair that the function returns.
        """
        function = self._function
        if not self.weight:
            tree, given = flatten(output)
            zeros = [np.zeros_like(x) if x.dtype.kind in DIFFERENTIABLE else None for x in given]
            # Numbers and strings beside the output's arrays have no gradient either.
            return 0.0, unflatten(tree, zeros, plain=False)
        found = function(output, self._target)
        back = getattr(function, "backward", None)
        if back is not None:
            return self.weight * float(found), back(self.weight)
        if type(found) is tuple and len(found) == 2:
            tree, grads = flatten(found[1])
            scaled = [grad * self.weight for grad in grads]
            return self.weight * float(found[0]), unflatten(tree, scaled)
        raise InvalidArgument(
            f"rank {self._rank}: loss_fn={function!r} has no backward(scale) and did not return "
            "(loss, gradient): without autograd, one of these is needed"
        )


class BatchLoss:
    """The loss of a batch, as a weighted sum over its microbatches.

    `function`, `target`, `count` and `reduction` are the arguments of :meth:`Pipeline.step`; the
    weight of a microbatch is its share of all rows, or of all targets that count::

        mean of 3 + 3 + 4 rows  =  3/10 mean of 3  +  3/10 mean of 3  +  4/10 mean of 4
    """

    def __init__(
        self,
        function: Any,
        target: Any,
        microbatches: int,
        rank: int,
        count: Any = None,
        reduction: Any = None,
    ):
        if target is None:
            raise InvalidArgument(f"rank {rank}: target=None: rank {rank} must provide the target")
        parts = cut(target, microbatches, rank, "target")
        self._targets, self._rows, self._rank = parts.values(), parts.rows, rank
        self._function, self._sums = function, is_sum(function, reduction, rank)
        # For each microbatch, the divisor of its mean: its rows, or the targets that count.
        self.counts = [float(number) for number in parts.rows]
        if count is not None:
            self.counts = [_checked(count, target, rank) for target in self._targets]
        elif not self._sums:
            self._find_counts(adapter(library(parts.tensors[0][0]), "loss"))
        # The divisor of the batch's loss; with replicas the pipeline sets it to the replicas' mean.
        self.total = sum(self.counts)

    def _find_counts(self, losses: Any) -> None:
        """Set `counts` if the function is a known one of the target's library: cross_entropy, ….

        `losses` is the library's adapter for losses, None without one.  InvalidArgument if an
        unknown function ignores some targets: its divisors cannot be known.
        """
        known = None
        if losses is not None and is_tensor(self._targets[0]):
            known = losses.known(self._function)
        if known is not None:
            # A count is None for targets that are probabilities: then all rows count, as set above.
            counts = [known.count(target) for target in self._targets]
            if None not in counts:
                self._function, self._sums, self.counts = known.function, known.sums, counts
        elif (ignored := declared(self._function, "ignore_index")) is not None:
            raise InvalidArgument(
                f"rank {self._rank}: loss_fn ignores targets (ignore_index={ignored!r}), and is "
                "not a loss of PyTorch: expected step(…, count=), a function of the target that "
                "returns how many of them count"
            )

    def of(self, microbatch: int, rows: int) -> MicrobatchLoss:
        """Return the weighted loss function of one microbatch, whose input has `rows` rows.

        InvalidArgument if its target has another number of rows.
        """
        own = self._rows[microbatch]
        if rows != own:
            raise InvalidArgument(
                f"rank {self._rank}: target has {own} rows in microbatch {microbatch}: expected "
                f"{rows}, as the input has"
            )
        part = 1.0 if self._sums else self.counts[microbatch]
        weight = part / self.total if self.total else math.nan
        return MicrobatchLoss(self._function, self._targets[microbatch], weight, self._rank)


def _checked(count: Callable, target: Any, rank: int) -> float:
    """Return ``count(target)``, checked to be a number >= 0."""
    check_function("count", count, "a microbatch's target", f"rank {rank}: ")
    found = count(target)
    number = float(found) if hasattr(found, "shape") or isinstance(found, Real) else math.nan
    if not 0 <= number < math.inf:
        raise InvalidArgument(f"rank {rank}: count returned {found!r}: expected a number >= 0")
    return number
