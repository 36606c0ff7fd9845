"""Arrays as flat buffers: what users pass, what may be written, what overlaps."""

from __future__ import annotations

import ctypes
import logging
import math
from typing import Any

import numpy as np

from ..device.recognise import describe, is_on_device, is_torch, of_torch
from ..errors import InvalidArgument, MpidistError, UnsupportedDtype


def view_at(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Give a view that does not keep the memory's owner alive: the program cache watches it."""
    if count == 0:
        return np.empty(0, dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.ndarray((count,), dtype, memory)  # type: ignore[arg-type]


_MOST_DIMENSIONS = 32 if np.lib.NumpyVersion(np.__version__) < "2.0.0" else 64


def check_shape(shape: Any, dtype: Any, rank: int) -> tuple[tuple[int, ...], np.dtype]:
    """Give shape and dtype of an array to be made, as numpy would have them.

    Raises
    ------
    InvalidArgument
        If there can be no such array, whatever the memory.
    """
    known = _known(dtype, rank)
    try:
        dims = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    except TypeError:
        dims = (shape,)
    if any(not isinstance(n, (int, np.integer)) or n < 0 for n in dims):
        raise InvalidArgument(f"rank {rank}: shape={shape!r}: whole numbers >= 0 are allowed")
    dims = tuple(map(int, dims))
    if known.subdtype is not None:
        known, more = known.subdtype
        dims += more
    if len(dims) > _MOST_DIMENSIONS:
        raise InvalidArgument(
            f"rank {rank}: shape has {len(dims)} dimensions, numpy allows {_MOST_DIMENSIONS}"
        )
    # Numpy counts so, also where one of them is 0.
    if math.prod(max(n, 1) for n in dims) * known.itemsize > np.iinfo(np.intp).max:
        raise InvalidArgument(
            f"rank {rank}: shape={shape!r} of {known}: allowed are {np.iinfo(np.intp).max} bytes"
        )
    return dims, known


def _known(dtype: Any, rank: int) -> np.dtype:
    try:
        known = np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgument(f"rank {rank}: dtype={dtype!r}: {error}") from None
    if known.hasobject:
        raise InvalidArgument(f"rank {rank}: dtype {known} cannot lie in shared memory")
    if not known.itemsize:
        raise InvalidArgument(f"rank {rank}: dtype={dtype!r} has no length: say how many bytes")
    return known


log = logging.getLogger("mpidist")
_BYTE = ctypes.c_char
_PLAIN = (list, tuple, int, float, complex, type(None))  # what most often exposes no memory


def as_input(x: Any, rank: int, argument: str = "x", device: bool = False) -> Any:
    """Return the elements of `x`, which is only read, as a numpy array.

    That is a view where `x` exposes host memory, else what numpy makes of it: lists and scalars.
    With `device`, an array on a GPU is returned as a
    :class:`~mpidist.device.array.DeviceArray`.

    Raises
    ------
    UnsupportedDtype
        For object arrays: their elements are addresses, of no meaning to another process.
    InvalidArgument
        For GPU arrays where `device` is not set, masked arrays, and what numpy makes no array of.
    """
    if type(x) is not np.ndarray:
        if is_on_device(x):
            if device:
                return describe(x, rank, argument)
            raise InvalidArgument(
                f"rank {rank}: {argument} is a GPU array ({_kind(x)}); this "
                "call takes host memory only: pass a numpy array (for cupy: x.get())"
            )
        memory = exposed(x, rank, argument)
        try:
            x = np.asarray(x) if memory is None else memory
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"rank {rank}: {argument} is no array: {error}") from None
    if x.dtype.hasobject:
        raise UnsupportedDtype(
            f"rank {rank}: {argument} has dtype {x.dtype}; Python objects go by send_object, "
            "broadcast_object and allgather_object"
        )
    return x


def as_output(out: Any, rank: int, argument: str = "out") -> np.ndarray:
    """Return the memory of `out`, which is to be filled, as a numpy array on it.

    Raises
    ------
    UnsupportedDtype
        For object arrays.
    InvalidArgument
        For what cannot be filled: lists, scalars, read-only memory, GPU arrays.
    """
    if type(out) is not np.ndarray:
        if is_on_device(out):
            raise InvalidArgument(
                f"rank {rank}: {argument} is a GPU array and the input is not; use one kind"
            )
        memory = exposed(out, rank, argument, fill=True)
        if memory is None:
            raise InvalidArgument(
                f"rank {rank}: {argument} must be filled, and a {_kind(out)} cannot be: pass a "
                "numpy array, a CPU tensor, a bytearray or other writable memory"
            )
        out = memory
    if out.dtype.hasobject:
        raise UnsupportedDtype(
            f"rank {rank}: {argument} has dtype {out.dtype}; Python objects go by broadcast_object"
        )
    if not out.flags.writeable:
        raise InvalidArgument(f"rank {rank}: {argument} is read-only; it must be writable")
    if not out.flags.c_contiguous and any(n > 1 and not s for n, s in zip(out.shape, out.strides)):
        raise InvalidArgument(
            f"rank {rank}: {argument} of shape {out.shape} has strides {out.strides}: several "
            "elements share memory, so it cannot be filled; pass a copy"
        )
    return out


def exposed(x: Any, rank: int, argument: str = "x", fill: bool = False) -> np.ndarray | None:
    """Return an array on the host memory that `x` exposes; None if it exposes none.

    With `fill` it will be written to: a tensor that must be copied to be read is refused.
    """
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise InvalidArgument(
                f"rank {rank}: {argument} is a masked array, and a mask is not communicated; pass "
                "x.filled(value), or x.data and x.mask"
            )
        return np.asarray(x)
    if is_torch(x):
        try:
            return of_torch().as_array(x, fill)
        except MpidistError as error:
            raise type(error)(f"rank {rank}: {argument} is {error}") from None
    if isinstance(x, (str, np.generic, *_PLAIN)):
        return None
    if not hasattr(x, "__array_interface__") and not hasattr(x, "__array_struct__"):
        try:
            memoryview(x).release()
        except (TypeError, ValueError, BufferError, NotImplementedError):
            return None
    try:  # numpy reads bytes as a string, which can have other zeros behind it
        return np.frombuffer(x, np.uint8) if isinstance(x, bytes) else np.asarray(x)
    except Exception as error:
        raise InvalidArgument(
            f"rank {rank}: {argument} is a {_kind(x)} that numpy cannot view: {error}"
        ) from None


def kind_of_memory(x: Any) -> str:
    """Return "device", "tensor" (on the host) or "array": what a new result for `x` is to be."""
    if type(x) is np.ndarray:
        return "array"
    return "device" if is_on_device(x) else "tensor" if is_torch(x) else "array"


def like_input(x: Any, result: np.ndarray) -> Any:
    """Return a tensor on the memory of a new `result` if `x` is one; None if the array will do."""
    return of_torch().as_tensor(result) if is_torch(x) else None


def new_tensor(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return a new CPU tensor, for a result of what is a tensor on another rank."""
    return of_torch().as_tensor(np.empty(shape, dtype))


def _kind(x: Any) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def flat(x: np.ndarray, note: str = "x") -> np.ndarray:
    """Give the elements of `x` as one contiguous 1-D array: a view if possible, else a copy."""
    if x.flags.c_contiguous:
        return x.reshape(-1)
    log.debug("%s of shape %s is not contiguous: packed into a copy", note, x.shape)
    return np.ascontiguousarray(x).reshape(-1)


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, rank: int, argument: str = "out"
) -> np.ndarray:
    """Return the memory of `out` once a result of `shape` and `dtype` can be stored in it."""
    out = as_output(out, rank, argument)
    if out.dtype != dtype:
        raise InvalidArgument(
            f"rank {rank}: {argument} has dtype {out.dtype}, the result has {dtype}"
        )
    if out.shape != shape:
        raise InvalidArgument(
            f"rank {rank}: {argument} has shape {out.shape}, the result has {shape}"
        )
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
