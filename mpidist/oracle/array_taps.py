"""Taps on models of mpidist.nn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from ..frameworks.arrays import FRAMEWORK
from ..frameworks.base import Framework
from ..nn import CrossEntropy
from ..nn.module import Module
from ..nn.optim import Optimizer
from ..parallel import DDP
from .taps import Taps


class ArrayLibrary:
    """What the taps must know of mpidist.nn: see :class:`~mpidist.oracle.taps.Library`."""

    framework: Framework = FRAMEWORK

    def install(self, taps: Taps) -> None:
        """Replace the calls of modules, losses and optimizers by recorded ones."""
        call, step = Module.__call__, Optimizer.step
        loss, backward = CrossEntropy.__call__, CrossEntropy.backward
        values: dict[int, float] = {}

        @wraps(call)
        def tapped_call(module: Any, *inputs: Any, **options: Any) -> Any:
            return taps.call(self, call, module, inputs, options)

        @wraps(step)
        def tapped_step(optimizer: Any) -> None:
            taps.join(self, optimizer, optimizer.parameters)
            taps.before_step(optimizer, optimizer.parameters)
            step(optimizer)
            taps.after_step(self, optimizer, optimizer.parameters)

        @wraps(loss)
        def tapped_loss(criterion: Any, scores: Any, labels: Any) -> float:
            values[id(criterion)] = value = loss(criterion, scores, labels)
            return value

        @wraps(backward)
        def tapped_backward(criterion: Any, scale: float = 1.0) -> Any:
            taps.loss(values[id(criterion)] * scale)
            return backward(criterion, scale)

        Module.__call__ = tapped_call  # type: ignore
        Optimizer.step = tapped_step  # type: ignore
        CrossEntropy.__call__ = tapped_loss  # type: ignore
        CrossEntropy.backward = tapped_backward  # type: ignore

    def is_wrapper(self, module: Any) -> bool:
        """Return whether a module is a DDP."""
        return isinstance(module, DDP)

    def is_recorded(self, module: Any) -> bool:
        """Return whether a module is in training mode."""
        return module.training

    def modules(self, model: Any) -> Iterator[tuple[str, Any]]:
        """Yield names and modules of a model, those of submodules joined by dots."""
        yield "", model
        children = getattr(model, "children", None)
        for name, child in children() if children is not None else ():
            for inner, module in self.modules(child):
                yield f"{name}.{inner}" if inner else name, module

    def trait(self, module: Any) -> str:
        """Return "": no layer of mpidist.nn has batch statistics or dropout."""
        return ""

    def random_state(self) -> None:
        """Return None: a layer that draws numbers has a generator of its own."""

    def states(self, optimizer: Any) -> dict[int, Mapping[str, Any]]:
        """Return the state of an optimizer, by the id of the parameter."""
        return {id(optimizer.parameters[i]): kept for i, kept in optimizer.state.items()}

    def extend(self, optimizer: Any, parameters: Sequence[Any]) -> bool:
        """Give an optimizer more parameters; return True."""
        optimizer.parameters.extend(parameters)
        return True


LIBRARY = ArrayLibrary()
