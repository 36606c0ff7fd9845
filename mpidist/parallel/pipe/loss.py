"""The loss of a microbatch, and how much of the whole batch's loss it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from .structure import flatten, is_tensor, unflatten

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
