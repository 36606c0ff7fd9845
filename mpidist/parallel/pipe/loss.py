"""The loss of a batch from those of its microbatches: the mean over the rows of all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import InvalidArgument
from .structure import is_tensor

REDUCTIONS = ("mean", "sum")


class Weighing:
    """How a loss function is used, checked once.

    Parameters
    ----------
    function : callable
        ``function(output, target)`` gives the mean over the rows of a microbatch; their sum if its
        attribute ``reduction`` is "sum".
    rank : int
        For error messages.
    """

    def __init__(self, function: Any, rank: int):
        if not callable(function):
            raise InvalidArgument(
                f"rank {rank}: loss_fn={function!r}: allowed are functions of output and target"
            )
        self.function, self.rank = function, rank
        self._sums = self._reduction() == "sum"

    def _reduction(self) -> str:
        found = getattr(self.function, "reduction", "mean")
        if found not in REDUCTIONS:
            raise InvalidArgument(
                f"rank {self.rank}: loss_fn has reduction={found!r}: allowed are 'mean' and 'sum'"
            )
        return found

    def of(self, target: Any, rows: int, total: float) -> MicrobatchLoss:
        """Give the loss of a microbatch that has `rows` of `total` rows."""
        weight = 1 / total if self._sums else rows / total
        return MicrobatchLoss(self.function, target, weight, self.rank)


class MicrobatchLoss:
    """A microbatch's part of the loss.

    Attributes
    ----------
    weight : float
        Of what the function gives.
    """

    __slots__ = ("_function", "_target", "weight", "_rank")

    def __init__(self, function: Callable[..., Any], target: Any, weight: float, rank: int):
        self._function, self._target, self.weight, self._rank = function, target, weight, rank

    def value(self, output: Any) -> float:
        """Give the number."""
        found = self._function(output, self._target)
        return self.weight * float(found[0] if type(found) is tuple else found)

    def tensor(self, output: Any) -> Any:
        """Give the weighted loss as a tensor from which autograd goes back."""
        found = self._function(output, self._target)
        if not is_tensor(found) or tuple(found.shape) not in ((), (1,)):
            what = f"shape {tuple(found.shape)}" if is_tensor(found) else type(found).__name__
            raise InvalidArgument(
                f"rank {self._rank}: loss_fn gave {what}: allowed is one number, as a tensor"
            )
        return found * self.weight

    def explicit(self, output: Any) -> tuple[float, Any]:
        """Give the number, and the gradient with respect to the output."""
        function = self._function
        found = function(output, self._target)
        back = getattr(function, "backward", None)
        if back is not None:
            return self.weight * float(found), back(self.weight)
        if type(found) is tuple and len(found) == 2:
            return self.weight * float(found[0]), found[1] * self.weight
        raise InvalidArgument(
            f"rank {self._rank}: loss_fn={function!r} has no backward(scale) and did not give "
            "(loss, gradient): without autograd, one of these is needed"
        )
