"""Tensors of PyTorch as arrays, on the host or on a GPU; imported only if PyTorch is in use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from ..errors import InvalidArgument, UnsupportedDtype
from ..operations import is_numpys

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # most tensors
QUANTIZED = "a quantized tensor; pass x.int_repr() or x.dequantize()"
WITHOUT_MEMORY = (
    "a tensor without memory of its own: freed, on the device meta, or of a tracer or a transform "
    "(torch.func); expected one with memory, such as x.clone() outside of it"
)
_INSTEAD = {
    "DTensor": "pass x.to_local(), or x.full_tensor()",
    "MaskedTensor": "pass x.get_data() and x.get_mask()",
    "NestedTensor": "pass x.values() and x.offsets()",
    "FakeTensor": "it has a shape and no values: call this outside of tracing",
    "FunctionalTensor": "it has a shape and no values: call this outside of tracing",
}
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


def needs(dtype: torch.dtype) -> str:
    """Return advice to install ml_dtypes if the dtype needs it and it is missing; else ""."""
    name = dtype_of(dtype)
    missing = isinstance(name, str) and _is_extra(name)
    return f"; {name} needs ml_dtypes: pip install ml_dtypes" if missing else ""


def make_like(x: torch.Tensor) -> Callable[[tuple[int, ...], np.dtype], torch.Tensor]:
    """Return ``make(shape, dtype)``, which returns a new tensor like `x` on the same device.

    The tensor has the dtype of `x`, which numpy may not have; `dtype` is ignored.
    """
    return lambda shape, dtype: torch.empty(shape, dtype=x.dtype, device=x.device)


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory of `x`: itself, unless its class says otherwise.

    A result of a functional collective, which tensor parallelism returns, is waited for.  Classes
    that redefine only Python functions, as torchvision's do, have memory like Tensor.

    Raises InvalidArgument for a class that redefines PyTorch's operators (``__torch_dispatch__``),
    whose address and strides are a show, and for a lazy parameter; the message continues "x is …".
    """
    kind = type(x)
    if kind in PLAIN:
        return x
    if torch.nn.parameter.is_lazy(x):
        raise InvalidArgument("a lazy parameter without a shape; call its module once before")
    if kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:
        return x
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(x, functional.AsyncCollectiveTensor):
        return unwrapped(x.trigger_wait())
    advice = _INSTEAD.get(kind.__name__, "pass the tensors that it is made of")
    raise InvalidArgument(
        f"a {kind.__module__}.{kind.__qualname__}, which redefines PyTorch's operators: what it "
        f"shows is not in its memory; expected a torch.Tensor: {advice}"
    )


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor whose elements are the memory it shows: `x`, or what it stands for.

    Raises InvalidArgument for what :func:`unwrapped` refuses, for sparse, nested and quantized
    tensors, and for those without memory: freed, meta, or of a tracer; the message continues "x is
    …".
    """
    x = unwrapped(x)
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise InvalidArgument(f"a {kind} tensor; pass a dense one, such as x.to_dense()")
    if x.is_quantized:
        raise InvalidArgument(QUANTIZED)
    try:
        there = x.data_ptr() or not x.numel()
    except RuntimeError:  # tensors of transforms
        there = False
    if not there:
        raise InvalidArgument(WITHOUT_MEMORY)
    return x


def as_array(x: torch.Tensor, fill: bool = False) -> np.ndarray:
    """Return an array on the memory of a CPU tensor, also of one that requires a gradient.

    It may have any strides; of a lazily conjugated or negated tensor it is a copy, which is refused
    if it is to be written to (`fill`).  Raises InvalidArgument, which continues "x is …", if the
    tensor is not a plain array in host memory; UnsupportedDtype if numpy, with ml_dtypes, has no
    such dtype.
    """
    x = plain(x)
    if x.device.type != "cpu":
        raise InvalidArgument(
            f"a tensor on {x.device}; expected one in host memory, such as x.cpu()"
        )
    if x.is_conj() or x.is_neg():
        if fill:
            raise InvalidArgument(
                "a lazily conjugated or negated tensor, which cannot be written to"
            )
        x = x.resolve_conj().resolve_neg()
    dtype = dtype_of(x.dtype)
    if isinstance(dtype, str):
        raise UnsupportedDtype(f"a tensor of {x.dtype}, which numpy does not have{needs(x.dtype)}")
    if x.requires_grad:
        x = x.detach()
    try:
        return words(x) if is_numpys(dtype) else words(x).view(dtype)
    except (RuntimeError, TypeError) as error:  # tensors of transforms and tracers have no memory
        raise InvalidArgument(f"a tensor without memory of its own: {error}") from None


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in order as a flat tensor of bytes; a copy if they are not.

    InvalidArgument if the tensor is not the memory it shows, as :func:`plain` says.
    """
    return plain(x).contiguous().reshape(-1).view(torch.uint8)


def words(x: torch.Tensor) -> np.ndarray:
    """Return an array on the memory of a CPU tensor: of integers if numpy itself has no such dtype.

    That is so with ml_dtypes too, for messages between ranks of which some may not have it.
    """
    dtype = dtype_of(x.dtype)
    own = not isinstance(dtype, str) and is_numpys(dtype)
    return (x if own else x.view(_WHOLE[x.element_size()])).numpy()


def as_tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor on the memory of an array, which the tensor keeps.

    The array may have integers in place of a `dtype` that numpy lacks, as :func:`words` returns.
    """
    if is_numpys(array.dtype):
        x = torch.from_numpy(array)
    else:
        x = torch.from_numpy(array.view(f"i{array.dtype.itemsize}"))
        dtype = dtype or getattr(torch, array.dtype.name)
    return x if dtype is None or x.dtype is dtype else x.view(dtype)


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by the itemsize of a dtype of ml_dtypes


def _is_extra(name: str) -> bool:
    """Return whether a dtype's name is one that only ml_dtypes, not numpy, may provide."""
    return name.startswith(("bfloat", "float8", "float4"))
