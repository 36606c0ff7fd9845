"""Arrays of numpy as messages between stages."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...errors import Unsupported


@cache
def _kind(dtype: np.dtype) -> tuple[str, bool]:
    """Give the name, which numpy takes long to make, and whether gradients are asked for."""
    return dtype.name, dtype.kind in "fc" or dtype.name == "bfloat16"


def has_gradient(dtype: np.dtype) -> bool:
    """Tell whether gradients are asked for arrays of a dtype."""
    return _kind(dtype)[1]


class NumpyTensors:
    """Arrays of numpy (see :class:`~.parcel.Tensors`)."""

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form; gradients are asked for floating and complex arrays."""
        name, wants = _kind(x.dtype)
        return name, x.shape, wants

    def array(self, x: Any) -> np.ndarray:
        """Give the elements; copied if they are not contiguous."""
        return np.ascontiguousarray(_in_host_memory(x)).reshape(-1)

    def own(self, x: Any) -> np.ndarray:
        """Give a copy: a layer may write each output into the same memory."""
        if not isinstance(x, np.ndarray):
            x = _in_host_memory(x)
        return np.array(x, order="C").reshape(-1)

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make an array."""
        if dtype == "bfloat16":
            import ml_dtypes  # gives numpy this name

            return np.empty(count, ml_dtypes.bfloat16)
        return np.empty(count, dtype)

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> np.ndarray:
        """Give the array in its shape."""
        return array.reshape(form[1])


def _in_host_memory(x: Any) -> Any:
    if not isinstance(x, (np.ndarray, np.generic)):
        raise Unsupported(
            f"a stage of numpy gave a {type(x).__module__}.{type(x).__name__}: between stages only "
            "arrays in host memory are sent"
        )
    return x
