"""The loss of a classifier."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..errors import InvalidArgument


def namespace(x: Any) -> ModuleType:
    """Give the module that an array belongs to, numpy or cupy, without importing either."""
    return sys.modules[type(x).__module__.partition(".")[0]]


class CrossEntropy:
    """The cross-entropy of softmaxed scores, computed without overflow.

    Parameters
    ----------
    reduction : {"mean", "sum"}
        Over the samples.  Ranks with unequal parts of a batch take sums, and divide by the size of
        the whole: the mean of means would weight samples unequally.
    """

    def __init__(self, reduction: str = "mean"):
        if reduction not in ("mean", "sum"):
            raise InvalidArgument(f"reduction={reduction!r}: allowed are 'mean' and 'sum'")
        self.reduction = reduction
        self._softmax: Any = None
        self._labels: Any = None

    def __call__(self, scores: Any, labels: Any) -> float:
        """Give the loss.

        Parameters
        ----------
        scores : ndarray, shape (n, classes)
            What the model says; larger is likelier.
        labels : ndarray of int, shape (n,)
            The right classes.

        Raises
        ------
        InvalidArgument
            If there are no samples, and their mean is asked for.
        """
        if self.reduction == "mean" and len(labels) == 0:
            raise InvalidArgument(
                "labels=[]: no samples have no mean; reduction='sum' is allowed, and divide by the "
                "size of the whole batch"
            )
        xp = namespace(scores)
        shifted = scores - scores.max(axis=1, keepdims=True)
        exponentials = xp.exp(shifted)
        totals = exponentials.sum(axis=1, keepdims=True)
        self._softmax, self._labels = exponentials / totals, labels
        rows = xp.arange(len(labels))
        loss = float((xp.log(totals[:, 0]) - shifted[rows, labels]).sum(dtype="float64"))
        return loss / len(labels) if self.reduction == "mean" else loss

    def backward(self, scale: float = 1.0) -> Any:
        """Give the gradient of ``scale * loss`` with respect to the scores."""
        grad = self._softmax.copy()
        count = len(self._labels)
        grad[namespace(grad).arange(count), self._labels] -= 1
        grad *= scale / count if self.reduction == "mean" else scale
        return grad
