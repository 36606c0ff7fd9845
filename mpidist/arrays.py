"""Arrays as flat buffers: what users pass, what may be written, what overlaps."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import numpy as np

from .device.recognise import describe, is_on_device
from .errors import InvalidArgument, UnsupportedDtype

log = logging.getLogger("mpidist")
_BYTE = ctypes.c_char


def as_input(x: Any, rank: int, argument: str = "x", device: bool = False) -> Any:
    """Give `x` as a numpy array; lists and scalars are taken where numpy would take them.

    With `device`, an array on a GPU is taken as well, and given as a
    :class:`~mpidist.device.array.DeviceArray`.

    Raises
    ------
    UnsupportedDtype
        For object arrays: their elements are addresses, of no meaning to another process.
    InvalidArgument
        For GPU arrays that are not asked for, or cannot be, and what numpy makes no array of.
    """
    if type(x) is not np.ndarray:
        if is_on_device(x):
            if device:
                return describe(x, rank, argument)
            raise InvalidArgument(
                f"rank {rank}: {argument} is a GPU array "
                f"({type(x).__module__}.{type(x).__name__}); this "
                "call takes host memory only: pass a numpy array (for cupy: x.get())"
            )
        try:
            x = np.asarray(x)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"rank {rank}: {argument} is no array: {error}") from None
    if x.dtype.hasobject:
        raise UnsupportedDtype(
            f"rank {rank}: {argument} has dtype {x.dtype}; Python objects go by send_object, "
            "broadcast_object and allgather_object"
        )
    return x


def flat(x: np.ndarray, note: str = "x") -> np.ndarray:
    """Give the elements of `x` as one contiguous 1-D array: a view if possible, else a copy."""
    if x.flags.c_contiguous:
        return x.reshape(-1)
    log.debug("%s of shape %s is not contiguous: packed into a copy", note, x.shape)
    return np.ascontiguousarray(x).reshape(-1)


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, rank: int, argument: str = "out"
) -> np.ndarray:
    """Check that a result of `shape` and `dtype` can be stored in `out`."""
    if is_on_device(out):
        raise InvalidArgument(
            f"rank {rank}: {argument} is a GPU array and the input is not; use one kind"
        )
    if not isinstance(out, np.ndarray):
        if isinstance(out, (list, tuple, int, float)) or not hasattr(out, "__array_interface__"):
            raise InvalidArgument(
                f"rank {rank}: {argument} must be a numpy array, not {type(out).__name__}"
            )
        out = np.asarray(out)
    if out.dtype.hasobject:
        raise UnsupportedDtype(
            f"rank {rank}: {argument} has dtype {out.dtype}; Python objects go by broadcast_object"
        )
    if out.dtype != dtype:
        raise InvalidArgument(
            f"rank {rank}: {argument} has dtype {out.dtype}, the result has {dtype}"
        )
    if out.shape != shape:
        raise InvalidArgument(
            f"rank {rank}: {argument} has shape {out.shape}, the result has {shape}"
        )
    if not out.flags.writeable:
        raise InvalidArgument(f"rank {rank}: {argument} is read-only; it must be writable")
    return out


def address(x: np.ndarray) -> int:
    """Give the address of the first element; as a buffer in a quarter of the time."""
    try:
        return ctypes.addressof(_BYTE.from_buffer(x))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, empty, of no plain dtype, or not contiguous
        return x.__array_interface__["data"][0]


def overlaps(x: np.ndarray, y: np.ndarray) -> bool:
    """Tell whether two flat arrays share memory."""
    return x.size > 0 and y.size > 0 and np.may_share_memory(x, y)


def owner(x: np.ndarray) -> Any:
    """Give the object whose death frees the memory of `x`."""
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return x
