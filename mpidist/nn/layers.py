"""Layers for numpy and cupy arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .module import Module, Parameter


class Linear(Module):
    """A linear layer: ``x @ weight.T + bias``.

    Parameters
    ----------
    inputs, outputs : int
        Number of features of an input and of an output sample.
    bias : bool
        Whether the layer has a bias.
    seed : int or numpy.random.Generator
        Seed of the initial values, which are uniform within ±1/√inputs.
    dtype : dtype
        Dtype of the parameters.

    Attributes
    ----------
    weight, bias : Parameter
        Parameters of shapes ``(outputs, inputs)`` and ``(outputs,)``; `bias` is None without one.
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
        """Return the outputs, (n, outputs), for a batch of inputs, (n, inputs)."""
        self._input = x
        y = x @ self.weight.data.T
        if self.bias is not None:
            y += self.bias.data
        return y

    def backward(self, grad: Any) -> Any:
        """Return the gradient of the last input, and add to the gradients of weight and bias.

        `grad` is the gradient of the output.
        """
        self._grad = grad
        self.backward_weight()
        return grad @ self.weight.data

    def backward_input(self, grad: Any) -> Any:
        """Return the gradient of the last input; keep `grad`, that of the output, for the weights.

        The weights' gradients are computed by :meth:`backward_weight`.
        """
        self._grad = grad
        return grad @ self.weight.data

    def backward_weight(self) -> None:
        """Add to the gradients of weight and bias, from the `grad` that was kept last."""
        grad, self._grad = self._grad, None
        self.weight.accumulate(grad.T @ self._input)
        if self.bias is not None:
            self.bias.accumulate(grad.sum(axis=0))


class ReLU(Module):
    """The rectifier ``max(x, 0)``, element by element."""

    saved = ("_positive",)
    _positive: Any = None

    def forward(self, x: Any) -> Any:
        """Return the input with negative elements set to zero."""
        self._positive = x > 0
        return x * self._positive

    def backward(self, grad: Any) -> Any:
        """Return `grad` where the last input was positive, and zero elsewhere."""
        return grad * self._positive
