"""Modules without a framework: mpidist.nn, and anything whose parameters have data and grad."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ..device.find import find_device
from ..device.recognise import is_on_device
from ..nn import Parameter
from .base import Remove


class Plain:
    """Parameters that hold numpy or cupy arrays (see :class:`~.framework.Framework`)."""

    def parameters(self, module: Any) -> list[tuple[str, Any]]:
        """List the parameters with their names (or numbers, if the module has none), each once."""
        names: Callable[[], Any] | None = getattr(module, "named_parameters", None)
        once: dict[int, tuple[str, Any]] = {}
        for name, p in enumerate(module.parameters()) if names is None else names():
            once.setdefault(id(p), (str(name), p))
        return list(once.values())

    def refusal(self, module: Any) -> str:
        """Return nothing: any module will do."""
        return ""

    def unready(self, module: Any) -> list[str]:
        """Name nothing: arrays have shapes."""
        return []

    def places(self, module: Any) -> list[Any]:
        """List nothing: who holds parameters is not known."""
        return []

    def buffers(self, module: Any) -> list[tuple[str, np.ndarray]]:
        """List what ``named_buffers()`` gives, if there is that."""
        names: Callable[[], Any] | None = getattr(module, "named_buffers", None)
        return [] if names is None else list(names())

    def as_array(self, x: Any) -> np.ndarray:
        """Return `x`."""
        return x

    def from_array(self, array: np.ndarray) -> Any:
        """Return `array`."""
        return array

    def values(self, p: Any) -> Any:
        """Give the array itself."""
        return p.data

    def kind(self, p: Any) -> Hashable:
        """Tell numpy from cupy, and dtypes."""
        return type(p.data).__module__, str(p.data.dtype)

    def like(self, p: Any, count: int) -> Any:
        """Make an array of the same library, on the same device."""
        return np.zeros_like(p.data, shape=(count,), order="C")

    def view(self, flat: Any, start: int, p: Any) -> Any:
        """Give a part in the shape of `p`."""
        return flat[start : start + math.prod(p.data.shape)].reshape(p.data.shape)

    def piece(self, flat: Any, gradient: Any, start: int, stop: int) -> Any:
        """Give a parameter."""
        return Parameter(flat[start:stop], gradient[start:stop])

    def stream(self, p: Any) -> int | None:
        """Ask the device, for cupy."""
        return find_device().current_stream() if is_on_device(p.data) else None

    def on_device(self, array: Any, p: Any) -> Any:
        """Give it in the parameter's dtype."""
        return array.view(p.data.dtype)

    def placed(self, value: Any, p: Any) -> Any:
        """Copy to the GPU, if the parameter is there."""
        if not is_on_device(p.data) or is_on_device(value):
            return value
        made = find_device().empty(value.shape, value.dtype)
        made.set(value)
        return made

    def copy(self, view: Any, gradient: Any) -> None:
        """Copy."""
        view[...] = gradient

    def clear(self, p: Any) -> None:
        """Fill with zeros."""
        p.grad[...] = 0

    def on_gradient(self, p: Any, act: Callable[[], object]) -> Remove | None:
        """Have `act` called by :meth:`mpidist.nn.Parameter.accumulate`."""
        hooks = getattr(p, "hooks", None)
        if hooks is None:
            return None
        p.hooks = (*hooks, act)

        def remove() -> None:
            p.hooks = tuple(hook for hook in p.hooks if hook is not act)

        return remove

    def on_forward(self, module: Any, act: Callable[[], object]) -> Remove | None:
        """Leave it to DDP, through which the module is called."""
        return None

    def optimizer_state(self, optimizer: Any, p: Any) -> dict[str, Any]:
        """Give the entry of a :class:`mpidist.nn.optim.Optimizer`."""
        return optimizer.state_of(p)

    def hand_over(self, optimizer: Any, groups: Sequence[Sequence[Any]]) -> None:
        """Give it the only group that there is."""
        optimizer.parameters = list(groups[0])
        optimizer.state.clear()


FRAMEWORK = Plain()
