"""The interface of a framework, the library that a model is written in; the table of adapters."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, Protocol
from weakref import WeakMethod

import numpy as np

from ..device.recognise import is_on_device, plain
from ..errors import InvalidArgument, Unsupported
from ..gpu.digests import digests
from ..operations import is_numpys
from ..shared_memory.digest import digest as digest_of


def digest(array: Any) -> tuple[int, ...]:
    """Return the :func:`~mpidist.shared_memory.digest.digest` of an array of any library."""
    if is_on_device(array):
        return tuple(digests([array])[0].tolist())
    return digest_of(array if type(array) is np.ndarray else framework_of(array).as_array(array))


def dtype_name(dtype: np.dtype) -> str:
    """Return a name of a dtype, from which :func:`find_dtype` returns the dtype again."""
    return dtype.str if is_numpys(dtype) else dtype.name


def find_dtype(name: str) -> np.dtype:
    """Return the dtype with this name, of numpy or of ml_dtypes.

    InvalidArgument if neither has it; Unsupported if ml_dtypes, which may have it, is not
    installed.
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


def why_not_plain(named: Iterable[tuple[str, Any]]) -> str:
    """Return which of some arrays is not the memory it shows, and why; "" if none."""
    for name, x in named:
        try:
            plain(x)
        except InvalidArgument as error:
            return f"{name} is {error}"
    return ""


def nothing(*_: Any) -> None:
    """Accept any arguments and do nothing; stands in for a callback that is not needed."""


class WeakHook:
    """A callback that calls a method as long as the method's object is alive, by a weak reference.

    A copied or unpickled callback does nothing: a copy of a module has no DDP.
    """

    def __init__(self, method: Callable[..., object]):
        self._reference = WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        """Call the method with the arguments if its object is alive; otherwise do nothing."""
        method = self._reference()
        if method is not None:
            method(*arguments)

    def __reduce__(self) -> Any:
        return partial, (nothing,)


Purpose = Literal["framework", "wrapper", "stage", "traced", "loss", "loader", "taps"]

ADAPTERS: dict[str | None, dict[Purpose, str]] = {
    None: {
        "framework": "mpidist.frameworks.arrays",
        "wrapper": "mpidist.parallel.array_wrapper",
        "stage": "mpidist.pipeline.array_stage",
        "taps": "mpidist.oracle.array_taps",
    },
    "torch": {
        "framework": "mpidist.torch.framework",
        "wrapper": "mpidist.torch.wrapper",
        "stage": "mpidist.torch.stage",
        "traced": "mpidist.torch.traced",
        "loss": "mpidist.torch.losses",
        "loader": "mpidist.torch.loader",
        "taps": "mpidist.torch.taps",
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
traced     ``cut(model, choose, …)``, the stages of a module that is no Sequential
loss       ``known(function)``, what the mean of a loss divides by
loader     ``shard_loader(data, comm, …)``
taps       ``LIBRARY``, by which ``mpidist check`` records what a script computes
=========  =============================================================
"""

Remove = Callable[[], object]


class Framework(Protocol):
    """Adapter for one library, such as PyTorch: its parameters, gradients, hooks and optimizers.

    Parameters of every library have ``data`` and ``grad``.  What differs between libraries is here.
    In these methods `p` is a parameter.
    """

    def parameters(self, module: Any) -> list[tuple[str, Any]]:
        """Return (name, parameter) for each trainable parameter of a module, each one once.

        Those of :meth:`ignored` are left out.
        """

    def ignored(self, module: Any) -> set[str]:
        """Return the names of parameters and buffers that each rank keeps for itself."""

    def why_not(self, module: Any) -> str:
        """Return why a module cannot be wrapped; an empty string if it can."""

    def sparse(self, module: Any) -> list[str]:
        """Return the names of trainable parameters whose gradients are sparse tensors."""

    def average_sparse(self, comm: Any, parameters: Sequence[Any], zeros: bool) -> None:
        """Replace sparse gradients of parameters by their means over the ranks; collective.

        A gradient that is None on all ranks stays None, or becomes zero if `zeros`.
        """

    def without_shape(self, module: Any) -> list[str]:
        """Return the names of parameters and buffers whose shape the first forward determines."""

    def registries(self, module: Any) -> list[Any]:
        """Return the dicts in which a module registers its parameters and submodules.

        The list is empty for a library without such dicts.
        """

    def buffers(self, module: Any) -> list[tuple[str, np.ndarray]]:
        """Return (name, array) for each buffer of a module; the array shares the memory.

        Those of :meth:`ignored` are left out.
        """

    def threads(self) -> int:
        """Return the number of threads of an operation of the library; 0 if it is unknown."""

    def as_array(self, x: Any) -> np.ndarray:
        """Return a numpy array on the memory of `x`, an array of this library on the host."""

    def from_array(self, array: np.ndarray) -> Any:
        """Return an array of this library on the memory of a numpy array."""

    def values(self, p: Any) -> Any:
        """Return an array on the memory of a parameter's values, as a communicator takes it."""

    def digest(self, p: Any) -> tuple[int, ...]:
        """Return the :func:`digest` of a parameter's values."""

    def kind(self, p: Any) -> Hashable:
        """Return a key of dtype and device; only parameters with equal keys share a bucket."""

    def zeros(self, p: Any, count: int) -> Any:
        """Return `count` zeros, a flat array for a communicator, with dtype and device of `p`."""

    def view(self, flat: Any, start: int, p: Any) -> Any:
        """Return a view of a flat array, from `start` on, with the shape and library of `p`."""

    def flat_parameter(self, flat: Any, gradient: Any, start: int, stop: int) -> Any:
        """Return a parameter on the elements `start` to `stop` of two flat arrays, without copies.

        Those of `flat` are its data, those of `gradient` its gradient.
        """

    def stream(self, p: Any) -> int | None:
        """Return the handle of the library's current GPU stream; None if `p` is on the host."""

    def from_device(self, array: Any, p: Any) -> Any:
        """Return an array of bytes on a GPU as one of this library, with the dtype of `p`."""

    def place(self, value: Any, p: Any) -> Any:
        """Return an array of a loaded state on the device of `p`, copied if it is elsewhere."""

    def copy(self, view: Any, gradient: Any) -> None:
        """Copy a gradient, which may be sparse or belong to an autograd graph, into `view`."""

    def clear(self, p: Any) -> None:
        """Fill the gradient of a parameter with zeros, in place."""

    def changes(self, x: Any) -> int | None:
        """Return how often an array was changed in place so far; None if the library has no count.

        Changes of its memory by another library do not count.
        """

    def on_gradient(self, p: Any, act: Callable[[], object]) -> Remove | None:
        """Call `act` after each addition of a backward pass to ``p.grad``.

        Return the function that removes this callback; None if parameters have no such hooks.
        """

    def on_forward(self, module: Any, act: Callable[[], object]) -> Remove | None:
        """Call `act` before each forward of a module.

        Return the function that removes this callback; None if the library has no such hooks, so
        that the forward of the DDP must call it.
        """

    def on_step(self, act: Callable[[Iterable[Any]], object]) -> Remove:
        """Call ``act(parameters)`` before each step of any optimizer, with its parameters.

        Return the function that removes this callback.
        """

    def is_elementwise(self, optimizer: Any) -> bool:
        """Return whether an optimizer class is known to update each element independently."""

    def optimizer_state(self, optimizer: Any, p: Any) -> dict[str, Any]:
        """Return the dict of an optimizer's state of a parameter; the optimizer sees changes."""

    def set_parameters(self, optimizer: Any, groups: Sequence[Sequence[Any]]) -> None:
        """Replace the parameters of each group of an optimizer; clear the optimizer's state."""


def library(x: Any) -> str | None:
    """Return the name of the library in :data:`ADAPTERS` that defines a class or base of `x`.

    It is "torch" for PyTorch, and None for numpy, cupy and everything else.
    """
    # By name, along its bases: no library is imported to find out that an object is not its.
    roots = (kind.__module__.partition(".")[0] for kind in type(x).__mro__)
    return next((root for root in roots if root in ADAPTERS), None)


def adapter(name: str | None, purpose: Purpose) -> Any:
    """Import and return the module in :data:`ADAPTERS` for a library and purpose.

    `name` is a result of :func:`library`, `purpose` is "framework", "wrapper", "stage", "traced",
    "loss", "loader" or "taps".  The result is None if the library has no module for the purpose.
    """
    module = ADAPTERS[name].get(purpose)
    return None if module is None else importlib.import_module(module)


def framework_of(x: Any) -> Framework:
    """Return the adapter for the library of a module, parameter or array."""
    return adapter(library(x), "framework").FRAMEWORK
