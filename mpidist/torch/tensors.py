"""Tensors of PyTorch as messages between stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .framework import as_array, as_tensor

_NAMES = {
    getattr(torch, name): name
    for name in (
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
        "uint8", "int8", "int16", "int32", "int64", "bool",
    )
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class TorchTensors:
    """Tensors of PyTorch (see :class:`~mpidist.parallel.pipe.parcel.Tensors`)."""

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form."""
        dtype = x.dtype
        return _NAMES.get(dtype) or str(dtype), tuple(x.shape), x.requires_grad

    def array(self, x: Any) -> np.ndarray:
        """Give the elements; copied if they are not contiguous."""
        x = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else as_array(x)

    def own(self, x: Any) -> np.ndarray:
        """Give the elements in memory of their own."""
        flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return self.array(flat.clone() if flat.data_ptr() == x.data_ptr() else flat)

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make an array; bfloat16 is kept in whole numbers of two bytes."""
        return np.empty(count, "int16" if dtype == "bfloat16" else dtype)

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> Any:
        """Give a tensor on this memory, whose gradient is asked for if the form says so."""
        dtype, shape, wants = form
        made = as_tensor(array, _DTYPES[dtype]).view(shape)
        return made.requires_grad_() if wants else made
