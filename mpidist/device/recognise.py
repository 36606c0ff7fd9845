"""Recognition and description of arrays on a device, without reading or copying them."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ..errors import InvalidArgument, UnsupportedDtype
from .array import DeviceArray, contiguous_strides
from .find import find_device


def is_torch(x: Any) -> bool:
    """Return whether `x` is a tensor of PyTorch, without importing PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


@cache
def of_torch() -> Any:
    """Return the module :mod:`.tensors`, which imports PyTorch: call it only with a tensor."""
    from . import tensors

    return tensors


def plain(x: Any) -> Any:
    """Return an array whose elements are the memory it shows: `x`, or what it stands for.

    This is the gate of every array that enters, of any library.  An array that is not the memory it
    shows would give wrong results without a word.  What is no array is returned as it is.

    Raises InvalidArgument for masked arrays, subclasses of numpy's ndarray that redefine its
    functions, and the tensors that :func:`mpidist.device.tensors.plain` refuses; the message
    continues "x is …".
    """
    kind = type(x)
    if kind is np.ndarray:
        return x
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise InvalidArgument(
                "a masked array, and a mask is neither sent nor saved; pass x.filled(value), or "
                "x.data and x.mask"
            )
        if any(getattr(kind, name) is not getattr(np.ndarray, name) for name in _MEANINGS):
            raise InvalidArgument(
                f"a {kind.__module__}.{kind.__qualname__}, which redefines numpy's functions: its "
                "numbers alone are not its value; pass np.asarray(x), and what else it has apart"
            )
        return x
    return of_torch().plain(x) if is_torch(x) else x


_MEANINGS = "__array_ufunc__", "__array_function__"  # a unit, say, is defined by these


def is_on_device(x: Any) -> bool:
    """Return whether `x` is an array in a device's memory, of any library."""
    try:
        return hasattr(x, "__cuda_array_interface__")
    except Exception:  # PyTorch raises various errors for tensors with gradient, and some dtypes
        return is_torch(x) and x.is_cuda


def as_device_array(x: Any, rank: int, argument: str = "x") -> DeviceArray:
    """Return the :class:`DeviceArray` of an array on a device; nothing is copied.

    Raises Unsupported if there is no device, or cupy is not installed; UnsupportedDtype if numpy
    does not have the dtype, or it is of Python objects.  Raises InvalidArgument if `x` is not a
    plain array on a device (but, for example, sparse), is not C-contiguous, has a mask, or is
    lazily conjugated or negated; if its address is null or in memory that the device cannot access;
    if its stream is being captured into a CUDA graph; if another device is the current one.
    """
    device = find_device(rank, argument, x)
    if is_torch(x):
        tensors = of_torch()
        try:
            x = tensors.plain(x)
        except InvalidArgument as error:
            raise InvalidArgument(f"rank {rank}: {argument} is {error}") from None
        if x.is_conj() or x.is_neg():
            raise InvalidArgument(
                f"rank {rank}: {argument} is a lazily conjugated or negated tensor (conj or neg "
                "bit set): pass x.resolve_conj().resolve_neg()"
            )
        interface, dtype, make = tensors.interface_of(x), None, tensors.make_like(x)
    elif not is_on_device(x):
        raise InvalidArgument(
            f"rank {rank}: {argument} is a {type(x).__name__} that is not on a GPU; expected an "
            "array there, of cupy or PyTorch"
        )
    else:
        interface, make = dict(x.__cuda_array_interface__), device.empty
        dtype = getattr(x, "dtype", None)
    if interface.get("mask") is not None:
        raise InvalidArgument(f"rank {rank}: {argument} has a mask; expected a plain array")
    shape = tuple(int(n) for n in interface["shape"])
    typestr = interface["typestr"]
    known = _dtype(typestr if dtype is None else dtype, typestr, rank, argument)
    pointer, readonly = interface["data"]
    strides = interface.get("strides")
    if strides is not None and not _is_contiguous(shape, tuple(strides), known.itemsize):
        raise InvalidArgument(
            f"rank {rank}: {argument} of shape {shape} on {device.name} has strides "
            f"{tuple(strides)}; expected a C-contiguous array, with strides "
            f"{contiguous_strides(shape, known.itemsize)}: pass a contiguous copy"
        )
    given = interface.get("stream")
    stream = device.current_stream() if given is None else int(given)
    if device.is_capturing(stream):
        raise InvalidArgument(
            f"rank {rank}: {argument} is passed while its stream is being captured into a CUDA "
            "graph, which cannot wait for other ranks; call this outside of the graph"
        )
    array = DeviceArray(
        int(pointer or 0),
        shape,
        known,
        stream,
        device,
        x,
        make,
        bool(readonly),
    )
    _check_pointer(array, rank, argument)
    return array


def on_host(x: Any) -> Any:
    """Return a copy in host memory of an array on a device; any other `x` is returned as it is.

    The copy of a tensor is a CPU tensor without gradient, that of other arrays a numpy array.
    """
    if not is_on_device(x):
        return x
    return x.detach().cpu() if is_torch(x) else x.get()


def make_like(x: DeviceArray, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
    """Return a new array of the library and on the device of `x`, with undefined contents.

    A tensor of PyTorch has the dtype of `x`, not `dtype`.
    """
    return as_device_array(x.make(shape, dtype), 0, "out")


def copy_of(x: DeviceArray, stream: int) -> DeviceArray:
    """Return a new array like `x`, to which the elements are copied on `stream`."""
    made = replace(make_like(x, x.shape, x.dtype), stream=stream)
    if x.nbytes:
        x.device.copy(made.pointer, x.pointer, x.nbytes, stream)
    return made


def _check_pointer(array: DeviceArray, rank: int, argument: str) -> None:
    if not array.size:
        return
    if not array.pointer:
        raise InvalidArgument(
            f"rank {rank}: {argument} of shape {array.shape} has a null pointer; was its memory "
            "freed?"
        )
    if not array.device.is_current():
        raise InvalidArgument(
            f"rank {rank}: {argument} is passed while another device is current in this thread; "
            f"expected {array.device.describe()}, which this rank uses: make it the current one"
        )
    if not array.device.owns(array.pointer):
        raise InvalidArgument(
            f"rank {rank}: {argument} claims to be on a GPU, but {array.pointer:#x} is not an "
            f"address of {array.device.describe()}; pass host memory as a numpy array"
        )


def _dtype(given: Any, typestr: str, rank: int, argument: str) -> np.dtype:
    """Return numpy's dtype of an array: `given`, its own dtype, if numpy has that; else `typestr`.

    `typestr` is that of the CUDA Array Interface, which has no code for some dtypes, such as
    bfloat16, and describes their elements as bytes.
    """
    try:
        found = np.dtype(given)
    except TypeError:
        try:
            found = np.dtype(typestr)
        except TypeError:
            raise UnsupportedDtype(
                f"rank {rank}: {argument} has dtype {given!r}, which numpy does not know"
            ) from None
    if found.hasobject:
        raise UnsupportedDtype(
            f"rank {rank}: {argument} has dtype {found}: Python objects cannot be sent as bytes"
        )
    return found


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return True
    wanted = contiguous_strides(shape, itemsize)
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, wanted))
