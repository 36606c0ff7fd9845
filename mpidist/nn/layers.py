"""The layers: numpy or cupy, whatever their input is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .module import Module, Parameter


class Linear(Module):
    """``x @ weight.T + bias``.

    Parameters
    ----------
    inputs, outputs : int
        Sizes of a sample before and after.
    bias : bool
        Whether there is a bias.
    seed : int or numpy.random.Generator
        Where the initial values come from: uniform within ±1/√inputs.
    dtype : dtype
        Of the parameters.

    Attributes
    ----------
    weight, bias : Parameter
        Of shapes ``(outputs, inputs)`` and ``(outputs,)``; `bias` may be None.
    """

    saved = ("_input", "_grad")

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        seed: int | np.random.Generator = 0,
        dtype: Any = np.float32,
    ):
        random = np.random.default_rng(seed)
        bound = 1 / math.sqrt(max(inputs, 1))
        weight = random.uniform(-bound, bound, (outputs, inputs))
        self.weight = Parameter(weight.astype(dtype))
        self.bias = (
            Parameter(random.uniform(-bound, bound, outputs).astype(dtype)) if bias else None
        )
        self._input: Any = None
        self._grad: Any = None

    def forward(self, x: Any) -> Any:
        """Map a batch of shape (n, inputs) to (n, outputs)."""
        self._input = x
        y = x @ self.weight.data.T
        if self.bias is not None:
            y += self.bias.data
        return y

    def backward(self, grad: Any) -> Any:
        """Map the gradient of the output, (n, outputs), to that of the input."""
        self._grad = grad
        self.backward_weight()
        return grad @ self.weight.data

    def backward_input(self, grad: Any) -> Any:
        """Give the gradient of the input, and keep that of the output for the weights."""
        self._grad = grad
        return grad @ self.weight.data

    def backward_weight(self) -> None:
        """Add the gradients of weight and bias."""
        grad, self._grad = self._grad, None
        self.weight.accumulate(grad.T @ self._input)
        if self.bias is not None:
            self.bias.accumulate(grad.sum(axis=0))


class ReLU(Module):
    """``max(x, 0)``."""

    saved = ("_positive",)
    _positive: Any = None

    def forward(self, x: Any) -> Any:
        """Set negative elements to zero."""
        self._positive = x > 0
        return x * self._positive

    def backward(self, grad: Any) -> Any:
        """Let through the gradient where the input was positive."""
        return grad * self._positive
