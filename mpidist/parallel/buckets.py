"""Gradients put together into buckets: few large messages instead of many small ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgument


def assign_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> list[tuple[int, ...]]:
    """Assign parameters to buckets, last parameter first.

    A backward pass computes gradients in reverse order, so the first bucket is complete first; it
    is smaller so that communication begins early (the rule of PyTorch's reducer).

    Parameters
    ----------
    nbytes : sequence of int
        Size of each parameter in bytes.
    kinds : sequence
        Parameters of different kinds (dtypes) never share a bucket.
    bucket_bytes, first_bucket_bytes : int
        Most bytes in a bucket, and in the first one.  A larger parameter has a bucket for itself.

    Returns
    -------
    list of tuple of int
        Indices of parameters, descending in each bucket; buckets in the order in which they become
        complete in a backward pass.

    Examples
    --------
    >>> assign_buckets([4, 4, 4, 4], "aaaa", 8, 4)
    [(3,), (2, 1), (0,)]
    """
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    limit = first_bucket_bytes
    for index in reversed(range(len(nbytes))):
        kind = kinds[index]
        if kind in filling and nbytes[index] > room[kind]:
            closed.append(filling.pop(kind))
        if kind not in filling:
            filling[kind], room[kind] = [], limit
            limit = bucket_bytes
        filling[kind].append(index)
        room[kind] -= nbytes[index]
    return sorted(map(tuple, [*closed, *filling.values()]), key=lambda bucket: -bucket[-1])


class Bucket:
    """Some parameters and the flat buffer that their gradients are put into.

    Parameters
    ----------
    parameters : sequence
        Objects of one dtype with ``data`` and ``grad``, in the order of the buffer.
    names : sequence of str
        What error messages call them.

    Attributes
    ----------
    flat : ndarray, 1-D
        The buffer, of the parameters' dtype and array module; made at its first use, then kept.
    """

    def __init__(self, parameters: Sequence[Any], names: Sequence[str]):
        self.parameters, self.names = list(parameters), list(names)
        self._flat: Any = None
        self._views: list[Any] = []

    @property
    def flat(self) -> Any:
        """The buffer."""
        if self._flat is None:
            sizes = [math.prod(p.data.shape) for p in self.parameters]
            # empty_like: numpy for numpy, cupy for cupy, on the same device.
            self._flat = np.empty_like(self.parameters[0].data, shape=(sum(sizes),), order="C")
            start = 0
            for p, size in zip(self.parameters, sizes, strict=True):
                self._views.append(self._flat[start : start + size].reshape(p.data.shape))
                start += size
        return self._flat

    def pack(self, rank: int) -> Any:
        """Put the gradients into the buffer, zeros where there is none, and give the buffer."""
        flat = self.flat
        for p, view, name in zip(self.parameters, self._views, self.names, strict=True):
            if p.grad is view:
                continue  # the backward has added to the last result: it is in place already
            if p.grad is None:
                view[...] = 0
            elif tuple(p.grad.shape) != view.shape:
                raise InvalidArgument(
                    f"rank {rank}: the gradient of {name} has shape {tuple(p.grad.shape)}, "
                    f"the parameter has {view.shape}"
                )
            else:
                view[...] = p.grad
        return flat

    def unpack(self) -> None:
        """Make every gradient the part of the buffer that belongs to it; nothing is copied."""
        for p, view in zip(self.parameters, self._views, strict=True):
            p.grad = view
