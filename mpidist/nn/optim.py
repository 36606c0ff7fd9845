"""Optimizers: they change parameters in place and skip those without a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import InvalidArgument


class Optimizer:
    """What SGD and Adam share: the parameters, the learning rate and the weight decay.

    Attributes
    ----------
    parameters : list of Parameter
        What is changed.
    state : dict of int to dict
        What is kept for each parameter, by its number.
    """

    def __init__(self, parameters: Iterable[Any], learning_rate: float, weight_decay: float):
        self.parameters = list(parameters)
        self.state: dict[int, dict[str, Any]] = {}
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name}={getattr(self, name)!r}: must be a number >= 0")

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Change every parameter that has a gradient."""
        for index, p in enumerate(self.parameters):
            if p.grad is not None:
                grad = p.grad + self.weight_decay * p.data if self.weight_decay else p.grad
                self._update(index, p.data, grad)

    def state_of(self, parameter: Any) -> dict[str, Any]:
        """Give what is kept for a parameter, to be read and changed."""
        index = next(i for i, p in enumerate(self.parameters) if p is parameter)
        return self.state.setdefault(index, {})

    def state_dict(self) -> dict[str, Any]:
        """Give copies of what is kept for the parameters, by number."""
        return {
            "state": {
                index: {k: v.copy() if hasattr(v, "copy") else v for k, v in kept.items()}
                for index, kept in self.state.items()
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with copies of what :meth:`state_dict` gave.

        Raises
        ------
        InvalidArgument
            If there is no such parameter, or it has another shape.
        """
        if not all(isinstance(index, int) for index in state["state"]):
            raise InvalidArgument(
                "state is by the names of parameters, as that of a ZeroOptimizer: allowed is what "
                "state_dict() of such an optimizer gave"
            )
        for index, kept in state["state"].items():
            shape = (
                tuple(self.parameters[index].data.shape) if index < len(self.parameters) else None
            )
            for key, value in kept.items():
                if hasattr(value, "shape") and tuple(value.shape) not in (shape, ()):
                    raise InvalidArgument(
                        f"state has {key} of shape {tuple(value.shape)} for parameter {index}, "
                        f"which has {shape}"
                    )
        self.state = {
            index: {k: v.copy() if hasattr(v, "copy") else v for k, v in kept.items()}
            for index, kept in state["state"].items()
        }

    def _update(self, index: int, data: Any, grad: Any) -> None:
        raise NotImplementedError


class SGD(Optimizer):
    """Stochastic gradient descent: ``v = momentum * v + grad; data -= learning_rate * v``.

    Parameters
    ----------
    parameters : iterable of Parameter
        What to change.
    learning_rate, momentum, weight_decay : float
        As in the formula; the decay adds ``weight_decay * data`` to the gradient.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        learning_rate: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, learning_rate, weight_decay)
        if not 0 <= momentum < 1:
            raise InvalidArgument(f"momentum={momentum!r}: must be a number in [0, 1)")
        self.momentum = momentum

    def _update(self, index: int, data: Any, grad: Any) -> None:
        if self.momentum:
            kept = self.state.setdefault(index, {})
            velocity = kept.get("velocity")
            if velocity is None:
                velocity = kept["velocity"] = grad.copy()
            else:
                velocity *= self.momentum
                velocity += grad
            grad = velocity
        data -= self.learning_rate * grad


class Adam(Optimizer):
    """Adam (Kingma & Ba, arXiv 1412.6980), with both moments corrected for their start at zero.

    Parameters
    ----------
    parameters : iterable of Parameter
        What to change.
    learning_rate : float
        Largest step of an element, nearly.
    betas : tuple of float
        Decay of the mean gradient and of its mean square.
    epsilon : float
        Added to the root of the mean square.
    weight_decay : float
        Times the data is added to the gradient.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, learning_rate, weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidArgument(f"betas={betas!r}: must be two numbers in [0, 1)")
        self.betas, self.epsilon = betas, epsilon

    def _update(self, index: int, data: Any, grad: Any) -> None:
        kept = self.state.setdefault(index, {})
        if not kept:
            kept.update(steps=0, mean=np.zeros_like(grad), square=np.zeros_like(grad))
        kept["steps"] += 1
        steps, mean, square = kept["steps"], kept["mean"], kept["square"]
        first, second = self.betas
        mean *= first
        mean += (1 - first) * grad
        square *= second
        square += (1 - second) * grad * grad
        root = (square / (1 - second**steps)) ** 0.5
        data -= (self.learning_rate / (1 - first**steps)) * mean / (root + self.epsilon)
