"""Arrays of numpy as messages between stages."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...errors import Unsupported, UnsupportedDtype
from ..dtypes import find_dtype

KINDS = "biufcmM"
"""Those of numpy's dtypes whose elements are nothing but their bytes."""


@cache
def _kind(dtype: np.dtype) -> tuple[str, bool]:
    """Give the name, which numpy takes long to make, and whether gradients are asked for."""
    name = dtype.name
    if dtype.type.__module__ == "ml_dtypes":
        return name, "float" in name
    if dtype.kind not in KINDS:
        raise UnsupportedDtype(
            f"an array of dtype {dtype} between stages: allowed are whole, floating, complex and "
            "boolean numbers, dates, and the dtypes of ml_dtypes"
        )
    return name, dtype.kind in "fc"


def has_gradient(dtype: np.dtype) -> bool:
    """Tell whether gradients are asked for arrays of a dtype."""
    return _kind(dtype)[1]


class NumpyTensors:
    """Arrays of numpy (see :class:`~.parcel.Tensors`); they arrive in the machine's byte order."""

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form; gradients are asked for floating and complex arrays."""
        name, wants = _kind(x.dtype)
        return name, x.shape, wants

    def array(self, x: Any) -> np.ndarray:
        """Give the elements; copied if they are not contiguous."""
        x = _in_host_memory(x)
        return np.ascontiguousarray(x, _native(x.dtype)).reshape(-1)

    def own(self, x: Any) -> np.ndarray:
        """Give a copy: a layer may write each output into the same memory."""
        if not isinstance(x, np.ndarray):
            x = _in_host_memory(x)
        return np.array(x, _native(x.dtype), order="C").reshape(-1)

    def result(self, x: Any) -> Any:
        """Give a copy for the same reason."""
        return x.copy() if hasattr(x, "copy") else x

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make an array."""
        return np.empty(count, find_dtype(dtype))

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> np.ndarray:
        """Give the array in its shape."""
        return array.reshape(form[1])


def _native(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _in_host_memory(x: Any) -> Any:
    if not isinstance(x, (np.ndarray, np.generic)):
        raise Unsupported(
            f"a stage of numpy gave a {type(x).__module__}.{type(x).__name__}: between stages only "
            "arrays in host memory are sent"
        )
    return x
