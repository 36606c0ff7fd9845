"""Optimizers, which update parameters in place and skip parameters without a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..errors import InvalidArgument

_before_steps: dict[object, Callable[[Iterable[Any]], object]] = {}


def before_steps(act: Callable[[Iterable[Any]], object]) -> Callable[[], object]:
    """Register ``act(parameters)``, called before each step of any optimizer of `mpidist.nn`.

    It gets the list of the optimizer's parameters.  Return a function that removes the callback.
    """
    key = object()
    _before_steps[key] = act
    return partial(_before_steps.pop, key, None)


class Optimizer:
    """Base class of optimizers: parameters, their state, learning rate and weight decay."""

    def __init__(self, parameters: Iterable[Any], learning_rate: float, weight_decay: float):
        self.parameters = list(parameters)
        # Of each parameter that has been updated, by its index.
        self.state: dict[int, dict[str, Any]] = {}
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name}={getattr(self, name)!r}: expected a number >= 0")

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for act in list(_before_steps.values()):
            act(self.parameters)
        for index, p in enumerate(self.parameters):
            if p.grad is not None:
                grad = p.grad + self.weight_decay * p.data if self.weight_decay else p.grad
                self._update(index, p.data, grad)

    def state_of(self, parameter: Any) -> dict[str, Any]:
        """Return the state of a parameter: the dict that steps use, empty before the first step."""
        index = next(i for i, p in enumerate(self.parameters) if p is parameter)
        return self.state.setdefault(index, {})

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {i: …}}`` with a copy of the state of each parameter number i."""
        return {
            "state": {
                index: {k: v.copy() if hasattr(v, "copy") else v for k, v in kept.items()}
                for index, kept in self.state.items()
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load copies of the states that :meth:`state_dict` returned.

        InvalidArgument if a state is that of a parameter that this optimizer does not have, or of
        another shape; if states are keyed by names.
        """
        if not all(isinstance(index, int) for index in state["state"]):
            raise InvalidArgument(
                "state is keyed by parameter names, as that of a ZeroOptimizer is: expected the "
                "result of state_dict() of an optimizer of this kind, keyed by their numbers"
            )
        for index, kept in state["state"].items():
            if not 0 <= index < len(self.parameters):
                raise InvalidArgument(
                    f"state has parameter {index}: this optimizer has {len(self.parameters)}"
                )
            shape = tuple(self.parameters[index].data.shape)
            for key, value in kept.items():
                if hasattr(value, "shape") and tuple(value.shape) not in (shape, ()):
                    raise InvalidArgument(
                        f"state has {key} of shape {tuple(value.shape)} for parameter {index} of "
                        f"{len(self.parameters)} parameters: expected shape {shape}"
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
        The parameters to update.
    learning_rate, momentum : float
        The factors of the formula.
    weight_decay : float
        Factor of the data that is added to the gradient: ``weight_decay * data``.
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
            raise InvalidArgument(f"momentum={momentum!r}: expected a number in [0, 1)")
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
        The parameters to update.
    learning_rate : float
        Roughly the most that an element changes by in one step.
    betas : tuple of float
        Decay rates of the gradient's running mean, and of the running mean of its square.
    epsilon : float
        Added to the root of the mean square, the divisor of a step.
    weight_decay : float
        Factor of the data that is added to the gradient: ``weight_decay * data``.
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
            raise InvalidArgument(f"betas={betas!r}: expected two numbers in [0, 1)")
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
