"""CUDA tensors of PyTorch: imported only where there is one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

LEGACY = 1  # what the interface calls the default stream, which PyTorch calls 0


def interface_of(x: torch.Tensor) -> dict[str, Any]:
    """Give a tensor as the CUDA Array Interface does, and those that need a gradient too."""
    dtype = dtype_of(x.dtype)
    stream = torch.cuda.current_stream(x.device).cuda_stream or LEGACY if x.is_cuda else 0
    return {
        "shape": tuple(x.shape),
        "strides": tuple(step * dtype.itemsize for step in x.stride()),
        "typestr": dtype,
        "data": (x.data_ptr(), False),
        "stream": stream,
    }


def dtype_of(dtype: torch.dtype) -> Any:
    """Give numpy's dtype for torch's; its name where numpy has none."""
    name = str(dtype).partition(".")[2]
    if name.startswith(("bfloat", "float8", "float4")):
        try:
            return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        except (ImportError, AttributeError):
            pass
    try:
        return np.dtype(name)
    except TypeError:
        return name


def make_like(x: torch.Tensor) -> Callable[[tuple[int, ...], np.dtype], torch.Tensor]:
    """Give what makes new tensors on the device of `x`, of its dtype."""
    return lambda shape, dtype: torch.empty(shape, dtype=x.dtype, device=x.device)
