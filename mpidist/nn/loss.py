"""The cross-entropy loss of a classifier."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..errors import InvalidArgument


def namespace(x: Any) -> ModuleType:
    """Return the module of an array's library, numpy or cupy, without importing either."""
    return sys.modules[type(x).__module__.partition(".")[0]]


class CrossEntropy:
    """The cross-entropy of softmaxed scores, computed without overflow.

    Parameters
    ----------
    reduction : {"mean", "sum"}
        Reduction over the samples.  Ranks with unequal parts of a batch use the sum and divide by
        the size of the whole batch: the mean of means would weight samples unequally.
    """

    def __init__(self, reduction: str = "mean"):
        if reduction not in ("mean", "sum"):
            raise InvalidArgument(f"reduction={reduction!r}: expected 'mean' or 'sum'")
        self.reduction = reduction
        self._softmax: Any = None
        self._labels: Any = None

    def __call__(self, scores: Any, labels: Any) -> float:
        """Return the loss, and keep the softmax for `backward`.

        `scores` has shape (n, classes): the larger, the likelier the class; `labels` the number of
        each sample's right class, from 0.  InvalidArgument for the mean of no samples.
        """
        if self.reduction == "mean" and len(labels) == 0:
            raise InvalidArgument(
                "labels=[]: expected at least one sample for a mean; or use reduction='sum' and "
                "divide by the size of the whole batch"
            )
        xp = namespace(scores)
        # The shift changes neither softmax nor loss, and no exponential overflows.
        shifted = scores - scores.max(axis=1, keepdims=True)
        exponentials = xp.exp(shifted)
        totals = exponentials.sum(axis=1, keepdims=True)
        self._softmax, self._labels = exponentials / totals, labels
        rows = xp.arange(len(labels))
        loss = float((xp.log(totals[:, 0]) - shifted[rows, labels]).sum(dtype="float64"))
        return loss / len(labels) if self.reduction == "mean" else loss

    def backward(self, scale: float = 1.0) -> Any:
        """Return the gradient of ``scale * loss`` with respect to the scores of the last call."""
        grad = self._softmax.copy()
        count = len(self._labels)
        grad[namespace(grad).arange(count), self._labels] -= 1
        grad *= scale / count if self.reduction == "mean" else scale
        return grad
