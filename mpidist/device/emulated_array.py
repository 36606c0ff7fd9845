"""Arrays of the emulated device: what cupy's do that training needs, on lazy streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

if TYPE_CHECKING:
    from .emulated import EmulatedDevice


class EmulatedArray(NDArrayOperatorsMixin):
    """An array in the emulated device's memory, as a GPU library would give it.

    Arithmetic is queued on the current stream, and done when someone waits for that.  As with
    cupy, nothing becomes host memory unless :meth:`get` is called, and host arrays do not mix in.

    Parameters
    ----------
    memory : ndarray
        Where it lies.
    device : EmulatedDevice
        Whose memory that is.
    """

    def __init__(self, memory: np.ndarray, device: EmulatedDevice):
        self._memory, self.device = memory, device
        self.shape, self.dtype, self.size = memory.shape, memory.dtype, memory.size
        self.ndim, self.nbytes, self.itemsize = memory.ndim, memory.nbytes, memory.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told = self._memory.__array_interface__
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": told["data"],
            "strides": told["strides"],
            "stream": self.device.current_stream(),
            "version": 3,
        }

    def get(self) -> np.ndarray:
        """Wait for the current stream and give a copy on the host."""
        self.device.synchronize(self.device.current_stream())
        return self._memory.copy()

    def set(self, values: Any) -> None:
        """Queue on the current stream that the array takes these values."""
        kept = np.array(values, self.dtype)
        self._launch(lambda: np.copyto(self._memory, kept))

    # -- as cupy's ------------------------------------------------------------------------------

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("an array of the emulated device is not on the host: call get()")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.pop("out", None)
        function = getattr(ufunc, method)
        if out is None:
            return self._make(lambda *x: function(*x, **options), *inputs)
        operands, target = [_memory(x) for x in inputs], out[0]
        self._launch(lambda: function(*operands, out=target._memory, **options))
        return target

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function is not np.zeros_like:
            return NotImplemented
        like, *rest = arguments
        made = np.zeros_like(like._memory, *rest, **options)
        return self.device.array(made)

    def __getitem__(self, key: Any) -> EmulatedArray:
        return EmulatedArray(self._memory[key], self.device)

    def __setitem__(self, key: Any, value: Any) -> None:
        source, target = _memory(value), self._memory
        self._launch(lambda: target.__setitem__(key, source))

    def __len__(self) -> int:
        return len(self._memory)

    def __float__(self) -> float:
        return float(self.get())

    @property
    def T(self) -> EmulatedArray:
        """The transposed view."""
        return EmulatedArray(self._memory.T, self.device)

    def reshape(self, *shape: Any) -> EmulatedArray:
        """Give the same memory in another shape."""
        return EmulatedArray(self._memory.reshape(*shape), self.device)

    def view(self, dtype: Any) -> EmulatedArray:
        """Give the same memory as elements of another dtype."""
        return EmulatedArray(self._memory.view(dtype), self.device)

    def sum(self, axis: Any = None, dtype: Any = None) -> EmulatedArray:
        """Add the elements up."""
        return self._make(lambda x: x.sum(axis=axis, dtype=dtype), self)

    def astype(self, dtype: Any) -> EmulatedArray:
        """Give a copy of another dtype."""
        return self._make(lambda x: x.astype(dtype), self)

    def copy(self, order: str = "C") -> EmulatedArray:
        """Give a copy."""
        return self.astype(self.dtype)

    @property
    def flags(self) -> Any:
        """Those of the memory."""
        return self._memory.flags

    def _make(self, function: Callable[..., Any], *inputs: Any) -> EmulatedArray:
        """Queue that a new array takes what `function` gives by then; its shape is known now."""
        operands = [_memory(x) for x in inputs]
        with np.errstate(all="ignore"):
            like = np.asarray(function(*operands))
        made = self.device.empty(like.shape, like.dtype)
        self._launch(lambda: np.copyto(made._memory, function(*operands)))
        return made

    def _launch(self, action: Callable[[], object]) -> None:
        self.device.launch(action, self.device.current_stream())


def _memory(x: Any) -> Any:
    """Give the memory of an operand; scalars are taken as they are."""
    if isinstance(x, EmulatedArray):
        return x._memory
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("an array of the host and one of the emulated device do not mix")
    return x
