"""The interface of a framework, the library that a model is written in; the table of adapters."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
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
    """Return the name under which :func:`find_dtype` finds a dtype."""
    return dtype.str if is_numpys(dtype) else dtype.name


def find_dtype(name: str) -> np.dtype:
    """Return the dtype with this name, of numpy or of ml_dtypes.

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
    """Accept any arguments and do nothing; stands in for a callback that is not needed."""


class WeakHook:
    """A callback that calls a method while its object is alive, and does not keep it alive.

    A hook that is copied or pickled with its module does nothing: the copy is not wrapped.
    """

    def __init__(self, method: Callable[..., object]):
        self._reference = WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        """Call the method if its object is alive."""
        method = self._reference()
        if method is not None:
            method(*arguments)

    def __reduce__(self) -> Any:
        return partial, (nothing,)


Purpose = Literal["framework", "wrapper", "stage", "loss", "loader"]

ADAPTERS: dict[str | None, dict[Purpose, str]] = {
    None: {
        "framework": "mpidist.frameworks.arrays",
        "wrapper": "mpidist.parallel.array_wrapper",
        "stage": "mpidist.pipeline.array_stage",
    },
    "torch": {
        "framework": "mpidist.torch.framework",
        "wrapper": "mpidist.torch.wrapper",
        "stage": "mpidist.torch.stage",
        "loss": "mpidist.torch.losses",
        "loader": "mpidist.torch.loader",
    },
}
"""The modules that adapt each library, by the package that its classes are defined in; None stands
for numpy, cupy and everything else.

=========  =============================================================
purpose    contents of the module
=========  =============================================================
framework  ``FRAMEWORK``, a :class:`Framework`
wrapper    ``Wrapper``, the base class that makes a DDP a module of the library
stage      ``stage(module, caller, where, checkpoint)``, a pipeline's stage
loss       ``known(function)``, what the mean of a loss divides by
loader     ``shard_loader(data, comm, …)``
=========  =============================================================
"""

Remove = Callable[[], object]


class Framework(Protocol):
    """Adapter of one library: its parameters, gradients, hooks and optimizers.

    Every library's parameters have ``data`` and ``grad``; the rest differs, and is here.
    """

    def parameters(self, module: Any) -> list[tuple[str, Any]]:
        """Return names and trainable parameters of a module, each parameter once."""

    def why_not(self, module: Any) -> str:
        """Return why a module cannot be wrapped; an empty string if it can."""

    def sparse(self, module: Any) -> list[str]:
        """Return the names of trainable parameters whose gradients have only the rows in use."""

    def average_sparse(self, comm: Any, parameters: Sequence[Any], zeros: bool) -> None:
        """Replace sparse gradients of parameters by their means over the ranks; collective.

        One that is None on all ranks stays None unless `zeros`.
        """

    def without_shape(self, module: Any) -> list[str]:
        """Return the names of parameters and buffers that have no shape yet."""

    def registries(self, module: Any) -> list[Any]:
        """Return the dicts in which a module registers its parameters and submodules.

        Empty for a library that has none.
        """

    def buffers(self, module: Any) -> list[tuple[str, np.ndarray]]:
        """Return names and arrays of the module's buffers; the arrays share memory with them."""

    def as_array(self, x: Any) -> np.ndarray:
        """Return a numpy array on the host memory of `x`."""

    def from_array(self, array: np.ndarray) -> Any:
        """Return an array of this library on the memory of a numpy array."""

    def values(self, p: Any) -> Any:
        """Return an array on the memory of a parameter, which a communicator can send."""

    def kind(self, p: Any) -> Hashable:
        """Return a key of dtype and device; only parameters with equal keys share a bucket."""

    def zeros(self, p: Any, count: int) -> Any:
        """Return a flat array of zeros for a communicator, with the dtype and device of `p`."""

    def view(self, flat: Any, start: int, p: Any) -> Any:
        """Return elements of a flat array, from `start` on, in the shape and library of `p`."""

    def flat_parameter(self, flat: Any, gradient: Any, start: int, stop: int) -> Any:
        """Return a parameter whose data and gradient are views of two flat arrays."""

    def stream(self, p: Any) -> int | None:
        """Return the stream that the library currently uses for `p`; None in host memory."""

    def from_device(self, array: Any, p: Any) -> Any:
        """Return an array of bytes on a GPU as one of this library, with the dtype of `p`."""

    def place(self, value: Any, p: Any) -> Any:
        """Return an array of a loaded state, copied to the memory of `p`: its GPU or the host."""

    def copy(self, view: Any, gradient: Any) -> None:
        """Copy the values of a gradient, which may be sparse or have a graph, into `view`."""

    def clear(self, p: Any) -> None:
        """Fill the gradient of a parameter with zeros, in place."""

    def on_gradient(self, p: Any, act: Callable[[], object]) -> Remove | None:
        """Register a callback for each addition to ``p.grad``; None if the library has no hook.

        Returns the function that removes it.
        """

    def on_forward(self, module: Any, act: Callable[[], object]) -> Remove | None:
        """Register a callback that precedes each forward; None if the DDP's own forward calls it.

        Returns the function that removes it.
        """

    def on_step(self, act: Callable[[Iterable[Any]], object]) -> Remove:
        """Call `act` before each step of any optimizer, with its parameters.

        Returns the function that removes the callback.
        """

    def is_elementwise(self, optimizer: Any) -> bool:
        """Return whether an optimizer class is known to update each element independently."""

    def optimizer_state(self, optimizer: Any, p: Any) -> dict[str, Any]:
        """Return the optimizer's state of a parameter; changes to it take effect."""

    def set_parameters(self, optimizer: Any, groups: Sequence[Sequence[Any]]) -> None:
        """Replace the parameters of each group of an optimizer by `groups`; clear its state."""


def library(x: Any) -> str | None:
    """Return the library in :data:`ADAPTERS` that defines the class of `x` or one of its bases."""
    roots = (kind.__module__.partition(".")[0] for kind in type(x).__mro__)
    return next((root for root in roots if root in ADAPTERS), None)


def adapter(name: str | None, purpose: Purpose) -> Any:
    """Import and return the adapter of the library `name` for a purpose; None without adapter."""
    module = ADAPTERS[name].get(purpose)
    return None if module is None else importlib.import_module(module)


def framework_of(x: Any) -> Framework:
    """Return the framework of a module, parameter or array."""
    return adapter(library(x), "framework").FRAMEWORK
