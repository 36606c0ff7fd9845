"""Modules of mpidist.nn, and any others whose parameters hold numpy or cupy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from ..device.find import find_device
from ..device.recognise import is_on_device, plain
from ..nn import SGD, Adam, Parameter
from ..nn.optim import before_steps
from .base import Remove, digest, why_not_plain


class Arrays:
    """Adapter for modules with numpy or cupy arrays as parameters.

    It is a :class:`~mpidist.frameworks.base.Framework`.  A module needs ``parameters()``;
    ``named_parameters()`` and ``named_buffers()`` are optional.
    """

    def parameters(self, module: Any) -> list[tuple[str, Any]]:
        """Return (name, parameter) for each parameter, once; names are "0", "1", … by default."""
        names: Callable[[], Any] | None = getattr(module, "named_parameters", None)
        once: dict[int, tuple[str, Any]] = {}
        for name, p in enumerate(module.parameters()) if names is None else names():
            once.setdefault(id(p), (str(name), p))
        return list(once.values())

    def ignored(self, module: Any) -> set[str]:
        """Return an empty set: every parameter and buffer is made equal on all ranks."""
        return set()

    def why_not(self, module: Any) -> str:
        """Return which parameter or buffer is not the memory it shows; "" if none."""
        data = [(name, p.data) for name, p in self.parameters(module)]
        return why_not_plain([*data, *self.buffers(module)])

    def sparse(self, module: Any) -> list[str]:
        """Return an empty list: every gradient is an array."""
        return []

    def average_sparse(self, comm: Any, parameters: Sequence[Any], zeros: bool) -> None:
        """Do nothing: no gradient is sparse."""

    def without_shape(self, module: Any) -> list[str]:
        """Return an empty list: every array has a shape."""
        return []

    def registries(self, module: Any) -> list[Any]:
        """Return an empty list: these modules keep no dicts of their parameters."""
        return []

    def buffers(self, module: Any) -> list[tuple[str, np.ndarray]]:
        """Return the module's ``named_buffers()``; an empty list if it has no such method."""
        names: Callable[[], Any] | None = getattr(module, "named_buffers", None)
        return [] if names is None else list(names())

    def threads(self) -> int:
        """Return 0: numpy does not tell how many threads its BLAS has."""
        return 0

    def as_array(self, x: Any) -> np.ndarray:
        """Return `x`; InvalidArgument if it is not the memory it shows, as a masked array."""
        return plain(x)

    def from_array(self, array: np.ndarray) -> Any:
        """Return `array`."""
        return array

    def values(self, p: Any) -> Any:
        """Return the parameter's array."""
        return p.data

    def digest(self, p: Any) -> tuple[int, ...]:
        """Return the :func:`~mpidist.frameworks.base.digest` of the parameter's array."""
        return digest(p.data)

    def kind(self, p: Any) -> Hashable:
        """Return the key that all parameters of a bucket share: array library and dtype."""
        return type(p.data).__module__, str(p.data.dtype)

    def zeros(self, p: Any, count: int) -> Any:
        """Return a flat array of `count` zeros of the parameter's library, dtype and device."""
        return np.zeros_like(p.data, shape=(count,), order="C")

    def view(self, flat: Any, start: int, p: Any) -> Any:
        """Return elements of a flat array, from `start` on, in the shape of `p`."""
        return flat[start : start + math.prod(p.data.shape)].reshape(p.data.shape)

    def flat_parameter(self, flat: Any, gradient: Any, start: int, stop: int) -> Any:
        """Return a Parameter of the elements `start` to `stop` of `flat`, without a copy.

        The same elements of `gradient` are the Parameter's gradient.
        """
        return Parameter(flat[start:stop], gradient[start:stop])

    def stream(self, p: Any) -> int | None:
        """Return the handle of the current GPU stream if `p` is on a GPU; None for numpy."""
        return find_device().current_stream() if is_on_device(p.data) else None

    def from_device(self, array: Any, p: Any) -> Any:
        """Return a view of `array`, bytes on a GPU, with the dtype of `p`."""
        return array.view(p.data.dtype)

    def place(self, value: Any, p: Any) -> Any:
        """Return `value`, an array of a loaded state, copied to the GPU if `p` is on it."""
        if not is_on_device(p.data) or is_on_device(value):
            return value
        copy = find_device().empty(value.shape, value.dtype)
        copy.set(value)
        return copy

    def copy(self, view: Any, gradient: Any) -> None:
        """Copy a gradient into a view; InvalidArgument if it is not the memory it shows."""
        view[...] = plain(gradient)

    def clear(self, p: Any) -> None:
        """Fill the gradient with zeros."""
        p.grad[...] = 0

    def changes(self, x: Any) -> None:
        """Return None: numpy and cupy do not count changes."""

    def on_gradient(self, p: Any, act: Callable[[], object]) -> Remove | None:
        """Call `act` after each addition to the gradient of a :class:`mpidist.nn.Parameter`.

        Return the function that removes this callback; None for another kind of parameter.
        """
        hooks = getattr(p, "hooks", None)
        if hooks is None:
            return None
        p.hooks = (*hooks, act)

        def remove() -> None:
            p.hooks = tuple(hook for hook in p.hooks if hook is not act)

        return remove

    def on_forward(self, module: Any, act: Callable[[], object]) -> Remove | None:
        """Register nothing, and return None: the forward of the DDP calls `act`."""
        return None

    def on_step(self, act: Callable[[Iterable[Any]], object]) -> Remove:
        """Call ``act(parameters)`` before each step of an optimizer of :mod:`mpidist.nn`.

        Return the function that removes this callback.
        """
        return before_steps(act)

    def is_elementwise(self, optimizer: Any) -> bool:
        """Return whether an optimizer class is SGD or Adam of :mod:`mpidist.nn`.

        They update each element from the history of that element alone.
        """
        return optimizer in (SGD, Adam)

    def optimizer_state(self, optimizer: Any, p: Any) -> dict[str, Any]:
        """Return a parameter's state in a :class:`mpidist.nn.optim.Optimizer`."""
        return optimizer.state_of(p)

    def set_parameters(self, optimizer: Any, groups: Sequence[Sequence[Any]]) -> None:
        """Replace the optimizer's parameters by ``groups[0]``, the only group; clear its state."""
        optimizer.parameters = list(groups[0])
        optimizer.state.clear()


FRAMEWORK = Arrays()
