"""The memory that autograd keeps for the way back of one microbatch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class Noted:
    """Notes what autograd saves, each time that it is entered."""

    def __init__(self) -> None:
        self._saved: list[Any] = []

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def __exit__(self, *about: Any) -> None:
        self._hooks.__exit__(*about)

    def _pack(self, x: Any) -> tuple[Any, int]:
        packed = x.detach()  # an output that held itself would never be gone
        self._saved.append(weakref.ref(packed))
        return packed, packed._version

    def nbytes(self, beside: Iterable[Any], apart: Iterable[Any]) -> int:
        """Count the bytes of what is still there, and of `beside`, but not of `apart`."""
        still = [x for x in (saved() for saved in self._saved) if x is not None]
        return nbytes_of([*still, *beside], apart)


def _unpack(packed: tuple[Any, int]) -> Any:
    x, version = packed
    if x._version != version:  # autograd does not look itself where there are hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {list(x.shape)}, version {x._version} in place of {version}"
        )
    return x


def nbytes_of(tensors: Iterable[Any], apart: Iterable[Any] = ()) -> int:
    """Count the bytes of the memory that tensors are in, each once."""
    found = dict(memory for x in tensors for memory in _memories(x))
    for x in apart:
        for place, _ in _memories(x):
            found.pop(place, None)
    return sum(found.values())


def _memories(x: Any) -> list[tuple[int, int]]:
    """Give where a tensor lies, and how many bytes are there."""
    if x.layout != torch.strided:
        parts = (x._indices(), x._values()) if x.is_sparse else ()
        return [memory for part in parts for memory in _memories(part)]
    try:
        storage = x.untyped_storage()
        return [(storage.data_ptr(), storage.nbytes())]
    except (NotImplementedError, RuntimeError):  # a tensor that only stands for others
        return [(id(x), x.numel() * x.element_size())]
