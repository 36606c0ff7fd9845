"""Arrays of numpy, and of cupy on a GPU, as messages between stages."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np

from ...device.find import find_device
from ...device.recognise import is_on_device
from ...errors import Unsupported, UnsupportedDtype
from ..dtypes import find_dtype
from .on_device import MARK, OnDevice

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


class NumpyTensors(OnDevice):
    """Arrays of numpy or cupy (see :class:`~.parcel.Tensors`).

    They arrive in the machine's byte order.
    """

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form; gradients are asked for floating and complex arrays."""
        name, wants = _kind(x.dtype)
        return name if type(x) is np.ndarray else name + MARK * is_on_device(x), x.shape, wants

    def array(self, x: Any) -> np.ndarray:
        """Give the elements; copied if they are not contiguous."""
        if is_on_device(x):
            return self.parcels.leave(_contiguous(x))
        x = _in_host_memory(x)
        return np.ascontiguousarray(x, _native(x.dtype)).reshape(-1)

    def own(self, x: Any) -> np.ndarray:
        """Give a copy: a layer may write each output into the same memory."""
        if not isinstance(x, np.ndarray):
            if is_on_device(x):
                return self.parcels.leave(x.copy() if self.parcels.direct else _contiguous(x))
            x = _in_host_memory(x)
        return np.array(x, _native(x.dtype), order="C").reshape(-1)

    def result(self, x: Any) -> Any:
        """Give a copy for the same reason."""
        return x.copy() if hasattr(x, "copy") else x

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make an array."""
        name, there = self.place(dtype)
        known = find_dtype(name)
        if there:
            return self.parcels.room(
                count * known.itemsize, lambda: find_device().empty((count,), known)
            )
        return np.empty(count, known)

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> Any:
        """Give the array in its shape."""
        name, there = self.place(form[0])
        if not there:
            return array.reshape(form[1])
        count, known = prod(form[1]), find_dtype(name)
        found = self.parcels.arrive(array, lambda: find_device().empty((count,), known))
        return found.reshape(form[1])


def _contiguous(x: Any) -> Any:
    """Give an array on a GPU in one piece."""
    return x if x.flags.c_contiguous else x.copy(order="C")


def _native(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _in_host_memory(x: Any) -> Any:
    if not isinstance(x, (np.ndarray, np.generic)):
        raise Unsupported(
            f"a stage of numpy gave a {type(x).__module__}.{type(x).__name__}: between stages "
            "arrays of numpy are sent, and arrays on a GPU"
        )
    return x
