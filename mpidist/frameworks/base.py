"""Adapters for the library that a model is written in: parameters, gradients, hooks, dtypes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Literal, Protocol
from weakref import WeakMethod
from zlib import crc32

import numpy as np

from ..device.recognise import on_host
from ..errors import InvalidArgument, Unsupported
from ..operations import is_numpys


def digest(array: Any) -> int:
    """Return the CRC-32 of the bytes of an array of any library."""
    host = framework_of(array).as_array(on_host(array))
    return crc32(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)


def dtype_name(dtype: np.dtype) -> str:
    """Name a dtype so that :func:`find_dtype` finds it."""
    return dtype.str if is_numpys(dtype) else dtype.name


def find_dtype(name: str) -> np.dtype:
    """Return the dtype of a name: one of numpy or of ml_dtypes.

    Raises
    ------
    Unsupported
        If numpy has no such dtype, and ml_dtypes is not installed.
    InvalidArgument
        If neither has such a dtype.
    """
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported(f"dtype {name} needs the package ml_dtypes") from None
    try:
        return np.dtype(getattr(ml_dtypes, name))
    except (AttributeError, TypeError):
        raise InvalidArgument(f"dtype {name!r}: neither numpy nor ml_dtypes has it") from None


def nothing(*_: Any) -> None:
    """Do nothing."""


class Weakly:
    """A form of a method for hooks: these must not keep alive what a user has dropped.

    A copy of it does nothing, in this process or another: who copies a module with its hooks gets
    one that nobody has wrapped.
    """

    def __init__(self, method: Callable[..., object]):
        self._reference = WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        """Call the method, if there is still somebody to do that for."""
        act = self._reference()
        if act is not None:
            act(*arguments)

    def __reduce__(self) -> Any:
        return partial, (nothing,)


Purpose = Literal["framework", "stage", "state", "loss", "loader"]

ADAPTERS: dict[str | None, dict[Purpose, str]] = {
    None: {
        "framework": "mpidist.frameworks.arrays",
        "stage": "mpidist.pipeline.array_stage",
    },
    "torch": {
        "framework": "mpidist.torch.framework",
        "stage": "mpidist.torch.stage",
        "state": "mpidist.torch.replay",
        "loss": "mpidist.torch.losses",
        "loader": "mpidist.torch.loader",
    },
}
"""The modules that adapt each library, by the package that its classes are defined in; None stands
for numpy, cupy and everything else.

=========  =====================================================
purpose    contents of the module
=========  =====================================================
framework  ``FRAMEWORK``, a :class:`Framework`
stage      ``stage(module, caller, where)``, a pipeline's stage
state      ``untouched(layers)``, a context manager
loss       ``known(function)`` and ``watched(function, …)``
loader     ``shard_loader(data, comm, …)``
=========  =====================================================
"""

Remove = Callable[[], object]


class Framework(Protocol):
    """One library's parameters, gradients and hooks.

    A parameter has ``data`` and ``grad``; what differs between libraries is here.
    """

    def parameters(self, module: Any) -> list[tuple[str, Any]]:
        """List the parameters that are learnt, with their names, each once."""

    def refusal(self, module: Any) -> str:
        """Return why a module cannot be wrapped; nothing if it can."""

    def unready(self, module: Any) -> list[str]:
        """Name parameters and buffers that have no shape yet."""

    def places(self, module: Any) -> list[Any]:
        """List the dicts that hold the module's parameters and modules, if they are in such."""

    def buffers(self, module: Any) -> list[tuple[str, np.ndarray]]:
        """List arrays that are part of the model and not learnt; they share memory with it."""

    def as_array(self, x: Any) -> np.ndarray:
        """Return a numpy array on the host memory of `x`."""

    def from_array(self, array: np.ndarray) -> Any:
        """Return an array of this library on the memory of a numpy array."""

    def values(self, p: Any) -> Any:
        """Give a parameter's values as an array that communicators take; it shares memory."""

    def kind(self, p: Any) -> Hashable:
        """Give what must be equal in a bucket."""

    def like(self, p: Any, count: int) -> Any:
        """Make a flat array of private memory, as communicators take it, for data like `p`'s."""

    def view(self, flat: Any, start: int, p: Any) -> Any:
        """Give the part of a flat array from `start` on that can be `p`'s data or gradient."""

    def piece(self, flat: Any, gradient: Any, start: int, stop: int) -> Any:
        """Give a flat parameter whose data and gradient are parts of two flat arrays."""

    def stream(self, p: Any) -> int | None:
        """Give the stream that `p`'s library queues work on now; None for host memory."""

    def on_device(self, array: Any, p: Any) -> Any:
        """Give a flat array of a GPU, of `p`'s dtype or its bytes, as the library has arrays."""

    def placed(self, value: Any, p: Any) -> Any:
        """Give an array of a state that was read, in the memory where `p` is."""

    def copy(self, view: Any, gradient: Any) -> None:
        """Copy a gradient into a view."""

    def clear(self, p: Any) -> None:
        """Fill the gradient that there is with zeros."""

    def on_gradient(self, p: Any, act: Callable[[], object]) -> Remove | None:
        """Have `act` called after something was added to `p.grad`; None if that cannot be."""

    def on_forward(self, module: Any, act: Callable[[], object]) -> Remove | None:
        """Have `act` called before each forward; None if who calls forward must do that."""

    def optimizer_state(self, optimizer: Any, p: Any) -> dict[str, Any]:
        """Give what an optimizer keeps for a parameter, to be read and changed."""

    def hand_over(self, optimizer: Any, groups: Sequence[Sequence[Any]]) -> None:
        """Have an optimizer change other parameters, by groups, and forget what it kept."""


def library(x: Any) -> str | None:
    """Return the library in :data:`ADAPTERS` that defines the class of `x` or one of its bases."""
    roots = (kind.__module__.partition(".")[0] for kind in type(x).__mro__)
    return next((root for root in roots if root in ADAPTERS), None)


def adapter(name: str | None, purpose: Purpose) -> Any:
    """Import and return the module that adapts a library for a purpose; None if there is none."""
    module = ADAPTERS[name].get(purpose)
    return None if module is None else importlib.import_module(module)


def framework_of(x: Any) -> Framework:
    """Return the framework of a module, parameter or array."""
    return adapter(library(x), "framework").FRAMEWORK
