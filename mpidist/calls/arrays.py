"""Arrays as flat buffers: conversion of users' arguments, checks of outputs, overlaps."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..device.array import DeviceArray
from ..device.find import find_device
from ..device.recognise import as_device_array, is_on_device, is_torch, make_like, of_torch, plain
from ..errors import InvalidArgument, MpidistError, UnsupportedDtype

log = logging.getLogger("mpidist")
_BYTE = ctypes.c_char
# The most frequent types that expose no memory.
_PLAIN = (list, tuple, int, float, complex, type(None))
_MOST_DIMENSIONS = 32 if np.lib.NumpyVersion(np.__version__) < "2.0.0" else 64


def view_at(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Return an array of `count` elements at an address; it does not keep the memory's owner alive.

    The program cache drops a bound call when the owner dies.  Raises InvalidArgument for address 0,
    for which numpy would allocate new memory.
    """
    if count == 0:
        return np.empty(0, dtype)
    if not address:
        raise InvalidArgument(f"an array of {count} x {dtype} with a null pointer: freed memory?")
    memory = (_BYTE * (count * dtype.itemsize)).from_address(address)
    return np.ndarray((count,), dtype, memory)  # type: ignore[arg-type]


def check_shape(shape: Any, dtype: Any, rank: int) -> tuple[tuple[int, ...], np.dtype]:
    """Check the shape and dtype of an array to allocate, and return them in numpy's form.

    InvalidArgument is raised for a length that is negative or no whole number, too many axes, a
    dtype of Python objects or of 0 bytes, or more bytes than an address can count.
    """
    known = _known(dtype, rank)
    try:
        dims = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    except TypeError:
        dims = (shape,)
    if any(not isinstance(n, (int, np.integer)) or n < 0 for n in dims):
        raise InvalidArgument(f"rank {rank}: shape={shape!r}: expected whole numbers >= 0")
    dims = tuple(map(int, dims))
    if known.subdtype is not None:
        known, more = known.subdtype
        dims += more
    if len(dims) > _MOST_DIMENSIONS:
        raise InvalidArgument(
            f"rank {rank}: shape has {len(dims)} dimensions, numpy allows {_MOST_DIMENSIONS}"
        )
    # Numpy counts so, also where one of them is 0.
    needed, most = math.prod(max(n, 1) for n in dims) * known.itemsize, np.iinfo(np.intp).max
    if needed > most:
        raise InvalidArgument(
            f"rank {rank}: shape={shape!r} of {known} needs {needed} bytes; the maximum is {most}"
        )
    return dims, known


def _known(dtype: Any, rank: int) -> np.dtype:
    try:
        known = np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgument(f"rank {rank}: dtype={dtype!r}: {error}") from None
    if known.hasobject:
        raise InvalidArgument(
            f"rank {rank}: dtype {known} holds Python objects, which cannot be shared"
        )
    if not known.itemsize:
        raise InvalidArgument(
            f"rank {rank}: dtype={dtype!r} has 0 bytes: expected a dtype with a size, such as S8"
        )
    return known


def as_input(x: Any, rank: int, device: bool = False) -> Any:
    """Return the elements of `x`, which is only read, as a numpy array.

    It is a view if `x` exposes host memory, else numpy's array of it (lists and scalars).  With
    `device`, an array on a GPU is returned as a :class:`~mpidist.device.array.DeviceArray`.

    InvalidArgument is raised for GPU arrays where `device` is not set, masked arrays, and values
    that numpy refuses; UnsupportedDtype for object arrays: their elements are addresses,
    meaningless to another process.
    """
    if type(x) is not np.ndarray:
        if is_on_device(x):
            if device:
                return as_device_array(x, rank, "x")
            raise InvalidArgument(
                f"rank {rank}: x is a GPU array ({_kind(x)}); this "
                "call takes host memory only: pass a numpy array (for cupy: x.get())"
            )
        memory = exposed(x, rank)
        try:
            x = np.asarray(x) if memory is None else memory
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"rank {rank}: x is not an array: {error}") from None
    if x.dtype.hasobject:
        raise UnsupportedDtype(
            f"rank {rank}: x has dtype {x.dtype}; send Python objects by send_object, "
            "broadcast_object or allgather_object"
        )
    return x


def as_output(out: Any, rank: int, argument: str = "out", device: bool = False) -> Any:
    """Return an array on the memory of `out`, which must be writable.

    It is a :class:`~mpidist.device.array.DeviceArray` with `device`, else a numpy array.

    InvalidArgument is raised for arguments that cannot be filled: lists, scalars, read-only memory,
    arrays whose elements share memory; for an array on a GPU if `device` is not set, and for any
    other if it is; UnsupportedDtype for object arrays.
    """
    if device:
        if not is_on_device(out):
            raise InvalidArgument(
                f"rank {rank}: {argument} is in host memory ({_kind(out)}) and x on a GPU; "
                "expected both on the host or both on a GPU"
            )
        out = as_device_array(out, rank, argument)
    elif type(out) is not np.ndarray:
        if is_on_device(out):
            raise InvalidArgument(
                f"rank {rank}: {argument} is a GPU array and the input is not; expected both or "
                "neither"
            )
        memory = exposed(out, rank, argument, fill=True)
        if memory is None:
            raise InvalidArgument(
                f"rank {rank}: {argument} has type {_kind(out)}, which cannot be written to; "
                "expected a numpy array, a CPU tensor, a bytearray or other writable memory"
            )
        out = memory
    if out.dtype.hasobject:
        raise UnsupportedDtype(
            f"rank {rank}: {argument} has dtype {out.dtype}; use broadcast_object for objects"
        )
    if not out.flags.writeable:
        raise InvalidArgument(f"rank {rank}: {argument} is read-only; expected writable memory")
    if not out.flags.c_contiguous and any(n > 1 and not s for n, s in zip(out.shape, out.strides)):
        raise InvalidArgument(
            f"rank {rank}: {argument} of shape {out.shape} has strides {out.strides}: several "
            "elements share memory; expected an array without overlap, such as a copy"
        )
    return out


def exposed(x: Any, rank: int, argument: str = "x", fill: bool = False) -> np.ndarray | None:
    """Return an array on the host memory that `x` exposes; None if it exposes none.

    With `fill` the array is for writing: a tensor that can only be read through a copy is refused.
    """
    try:
        if isinstance(x, np.ndarray):
            return np.asarray(plain(x))
        if is_torch(x):
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
    try:
        what = _not_shown(getattr(x, "__array_interface__", None) or {})
        if not what:  # numpy reads bytes as a string, which can have other zeros behind it
            return np.frombuffer(x, np.uint8) if isinstance(x, bytes) else np.asarray(x)
    except Exception as error:
        what = f"that numpy cannot view: {error}"
    raise InvalidArgument(f"rank {rank}: {argument} is a {_kind(x)} {what}")


def _not_shown(interface: Mapping[str, Any]) -> str:
    """Return why the memory that numpy's `interface` names is not what it shows, or nothing."""
    if interface.get("mask") is not None:
        return "with a mask, which is not communicated; expected a plain array"
    # For an address of 0 numpy allocates memory of its own, or raises: its versions differ.
    shape = tuple(interface.get("shape", ()))
    if 0 not in shape and (interface.get("data") or (1,))[0] == 0:
        return f"of shape {shape} with a null pointer; was its memory freed?"
    return ""


def kind_of_memory(x: Any) -> str:
    """Return the kind of `x`, for a new result: "device" (GPU), "tensor" (host) or "array"."""
    if type(x) is np.ndarray:
        return "array"
    return "device" if is_on_device(x) else "tensor" if is_torch(x) else "array"


def new_result(
    kind: str, shape: tuple[int, ...], dtype: np.dtype, rank: int, like: Any = None
) -> tuple[Any, Any]:
    """Return a new array, and the torch tensor on its memory, or None; the user gets the tensor.

    `kind` is as :func:`kind_of_memory` returns it.  An array on a GPU is made by the library of
    `like` (PyTorch, cupy) if it is given: the call's input.
    """
    if kind == "device":
        if like is not None:
            return make_like(like, shape, dtype), None
        return as_device_array(find_device(rank).empty(shape, dtype), rank, "out"), None
    result = np.empty(shape, dtype)
    return result, of_torch().as_tensor(result) if kind == "tensor" else None


def lacks_memory(error: Exception) -> bool:
    """Return whether numpy, cupy or PyTorch had no memory for an array."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _kind(x: Any) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def flat(x: np.ndarray) -> np.ndarray:
    """Return the elements of `x` as one contiguous 1-D array: a view if possible, else a copy."""
    if x.flags.c_contiguous:
        return x.reshape(-1)
    log.debug("x of shape %s is not contiguous: packed into a copy", x.shape)
    return np.ascontiguousarray(x).reshape(-1)


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, rank: int, device: bool = False
) -> Any:
    """Check that `out` can hold a result of `shape` and `dtype`; return an array on its memory.

    With `device` it must be on a GPU, else on the host.  Raises InvalidArgument if it does not fit.
    """
    out = as_output(out, rank, "out", device)
    if out.dtype != dtype:
        raise InvalidArgument(f"rank {rank}: out has dtype {out.dtype}, the result has {dtype}")
    if out.shape != shape:
        raise InvalidArgument(f"rank {rank}: out has shape {out.shape}, the result has {shape}")
    return out


def address(x: np.ndarray) -> int:
    """Return the memory address of an array's first element (four times as fast as numpy's way)."""
    try:
        return ctypes.addressof(_BYTE.from_buffer(x))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, empty, of no plain dtype, or not contiguous
        return x.__array_interface__["data"][0]


def overlaps(x: Any, y: Any) -> bool:
    """Return whether two arrays, both on the host or both on a GPU, share memory."""
    if type(x) is DeviceArray:
        return x.overlaps(y)
    return x.size > 0 and y.size > 0 and np.may_share_memory(x, y)


def part_of(x: Any, part: slice) -> Any:
    """Return a view of elements ``part.start`` to ``part.stop`` of a flat array, host or GPU."""
    return x.part(part.start, part.stop) if type(x) is DeviceArray else x[part]


def same_memory(x: Any, y: Any) -> bool:
    """Return whether two flat arrays of equal dtype occupy exactly the same memory."""
    if type(x) is DeviceArray:
        return x.size == y.size and x.pointer == y.pointer
    return x.size == y.size and address(x) == address(y)


def owner(x: np.ndarray) -> Any:
    """Return the object that owns the memory of `x`, at the end of numpy's chain of ``base``."""
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return x
