"""Tensors of PyTorch as arrays, on the host or on a GPU; imported only if PyTorch is in use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from ..errors import InvalidArgument, UnsupportedDtype
from ..operations import is_numpys

LEGACY = 1  # the default stream's number in the interface; PyTorch's is 0


def interface_of(x: torch.Tensor) -> dict[str, Any]:
    """Return the CUDA Array Interface of a tensor, also of one that requires a gradient.

    Unlike in the standard, ``typestr`` is the numpy dtype itself.
    """
    dtype = dtype_of(x.dtype)
    stream = torch.cuda.current_stream(x.device).cuda_stream or LEGACY if x.is_cuda else 0
    return {
        "shape": tuple(x.shape),
        "strides": tuple(step * x.element_size() for step in x.stride()),
        "typestr": dtype,
        "data": (x.data_ptr(), False),
        "stream": stream,
    }


@cache
def dtype_of(dtype: torch.dtype) -> Any:
    """Return numpy's dtype for one of PyTorch; the name as a str if numpy has no such dtype."""
    name = str(dtype).partition(".")[2]
    if _is_extra(name):
        try:
            return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        except (ImportError, AttributeError):
            pass
    try:
        return np.dtype(name)
    except TypeError:
        return name


def make_like(x: torch.Tensor) -> Callable[[tuple[int, ...], np.dtype], torch.Tensor]:
    """Return ``make(shape, dtype)``, which returns a new tensor like `x` on the same device.

    The tensor has the dtype of `x`, which numpy may not have; `dtype` is ignored.
    """
    return lambda shape, dtype: torch.empty(shape, dtype=x.dtype, device=x.device)


def why_no_array(x: torch.Tensor) -> str | None:
    """Return why a tensor's elements are not a plain array in memory, or None if they are.

    The reason is text that continues "x is …".
    """
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        return f"a {kind} tensor; pass a dense one, such as x.to_dense()"
    if x.is_quantized:
        return "a quantized tensor; pass x.int_repr() or x.dequantize()"
    return None


def as_array(x: torch.Tensor, fill: bool = False) -> np.ndarray:
    """Return an array on the memory of a CPU tensor, also of one that requires a gradient.

    Parameters
    ----------
    x : torch.Tensor
        A tensor of any strides; if it is conjugated or negated on reading, the result is a copy.
    fill : bool
        Whether the array will be written to, so that it must not be a copy.

    Raises
    ------
    InvalidArgument
        If the tensor is not a plain array in host memory; the message continues "x is …".
    UnsupportedDtype
        If numpy, with ml_dtypes, has no such dtype.
    """
    why = why_no_array(x)
    if why is None and x.device.type != "cpu":
        why = f"a tensor on {x.device}; expected one in host memory, such as x.cpu()"
    if why is None and (x.is_conj() or x.is_neg()):
        if fill:
            why = "a tensor that is conjugated or negated on reading, and cannot be written to"
        x = x.resolve_conj().resolve_neg()
    if why is not None:
        raise InvalidArgument(why)
    dtype = dtype_of(x.dtype)
    if isinstance(dtype, str):
        needs = f"; {dtype} needs ml_dtypes: pip install ml_dtypes"
        raise UnsupportedDtype(
            f"a tensor of {x.dtype}, which numpy does not have" + needs * _is_extra(dtype)
        )
    if x.requires_grad:
        x = x.detach()
    try:
        if is_numpys(dtype):
            return x.numpy()
        return x.view(_WHOLE[dtype.itemsize]).numpy().view(dtype)
    except (RuntimeError, TypeError) as error:  # tensors of transforms and tracers have no memory
        raise InvalidArgument(f"a tensor without memory of its own: {error}") from None


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares the memory of an array; PyTorch must have the dtype."""
    if is_numpys(array.dtype):
        return torch.from_numpy(array)
    whole = torch.from_numpy(array.view(f"i{array.dtype.itemsize}"))
    return whole.view(getattr(torch, array.dtype.name))


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by the itemsize of a dtype of ml_dtypes


def _is_extra(name: str) -> bool:
    """Return whether a dtype's name is one that only ml_dtypes, not numpy, may provide."""
    return name.startswith(("bfloat", "float8", "float4"))
