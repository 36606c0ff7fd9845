"""PyTorch's losses that ignore targets or weight classes, with the divisor of their means."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

_MODULES = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)


@dataclass(frozen=True)
class Known:
    """A loss function of PyTorch, with the number of targets by which its mean divides."""

    function: Callable[[Any, Any], Any]
    # The divisor of the mean, given the target: the number of targets that are not ignored or the
    # sum of their weights; None if it is the number of rows.
    count: Callable[[Any], float | None]
    sums: bool  # whether `function` returns sums, not means


def known(function: Any) -> Known | None:
    """Return PyTorch's cross_entropy or nll_loss as a :class:`Known`; None for any other loss."""
    for kind in _MODULES:
        if isinstance(function, kind) and type(function).forward is kind.forward:
            summed = copy.copy(function)
            summed.reduction = "sum"
            return Known(summed, partial(_count, function.weight, function.ignore_index), True)
    base, given = function, {}
    if isinstance(function, partial) and not function.args:
        base, given = function.func, function.keywords
    if inspect.unwrap(base) not in _FUNCTIONS:  # torch.compile wraps
        return None
    count = partial(_count, given.get("weight"), given.get("ignore_index", -100))
    if base not in _FUNCTIONS:
        return Known(function, count, False)  # as it was compiled
    return Known(partial(base, **{**given, "reduction": "sum"}), count, True)


def _count(weight: Any, ignored: int, target: Any) -> float | None:
    if target.is_floating_point():  # probabilities of all classes
        return None
    counts = target != ignored
    return float(counts.sum() if weight is None else weight[target[counts]].double().sum())
