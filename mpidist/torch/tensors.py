"""Tensors of PyTorch as messages between stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedDtype
from ..parallel.pipe.on_device import MARK, OnDevice
from . import cuda
from .framework import as_array, as_tensor

_NAMES = {
    getattr(torch, name): name
    for name in (
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
        "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool",
    )
    if hasattr(torch, name)  # not all of the unsigned ones before 2.3
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALLOWED = f"allowed are {', '.join(_DTYPES)}"


def separate(given: Sequence[Any]) -> list[Any]:
    """Give a microbatch's tensors versions of their own, on the same memory.

    All parts of a batch count changes together: one that is changed in place would make what
    autograd saved of another void.  Those that have a graph, or share memory, stay as they are.
    """
    simple = [x.layout == torch.strided and not x.is_inference() for x in given]
    if not all(simple) or len({x.untyped_storage().data_ptr() for x in given}) < len(given):
        return list(given)
    return [x if x.requires_grad else x.data for x in given]


def pass_on_changes(own: Sequence[Any], given: Sequence[Any]) -> None:
    """Count the changes of what :func:`separate` gave where autograd would have counted them."""
    for x, y in zip(given, own):
        if x is not y and y._version:
            torch.autograd.graph.increment_version(x)


class TorchTensors(OnDevice):
    """Tensors of PyTorch (see :class:`~mpidist.parallel.pipe.parcel.Tensors`)."""

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give the form."""
        name = _NAMES.get(x.dtype)
        if name is None:
            raise UnsupportedDtype(f"a tensor of {x.dtype} between stages: {_ALLOWED}")
        name += MARK * cuda.is_there(x)
        return name, tuple(x.shape), x.requires_grad

    def array(self, x: Any) -> np.ndarray:
        """Give the elements; copied if they are not contiguous."""
        x = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if cuda.is_there(x):
            return self.parcels.leave(x)
        return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else as_array(x)

    def own(self, x: Any) -> np.ndarray:
        """Give the elements in memory of their own."""
        flat = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        staged = cuda.is_there(x) and not self.parcels.direct  # which is a copy
        return self.array(flat.clone() if flat.data_ptr() == x.data_ptr() and not staged else flat)

    def result(self, x: Any) -> Any:
        """Give the tensor itself, as PyTorch does."""
        return x

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make an array; bfloat16 is kept in whole numbers of two bytes."""
        name, there = self.place(dtype)
        if name not in _DTYPES:
            raise UnsupportedDtype(f"an array of {name} for a stage of PyTorch: {_ALLOWED}")
        known = np.dtype("int16" if name == "bfloat16" else name)
        if there:
            return self.parcels.room(count * known.itemsize, lambda: self._make(name, count))
        return np.empty(count, known)

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> Any:
        """Give a tensor on this memory, whose gradient is asked for if the form says so."""
        dtype, shape, wants = form
        name, there = self.place(dtype)
        if there:
            made = self.parcels.arrive(array, lambda: self._make(name, prod(shape))).view(shape)
        else:
            made = as_tensor(array, _DTYPES[name]).view(shape)
        return made.requires_grad_() if wants else made

    def _make(self, name: str, count: int) -> Any:
        """Make a flat tensor on the GPU."""
        return torch.empty(count, dtype=_DTYPES[name], device=cuda.DEVICE)
