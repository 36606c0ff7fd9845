"""Communication hooks: fewer bytes for inexact gradients.

A hook is a function of a bucket that gives a Work; when that has ended, ``bucket.flat`` holds the
mean over the ranks, with equal bits on all of them.  :func:`~mpidist.parallel.chain.chained` makes
one of a generator that yields each Work it waits for::

    @chained
    def halved(bucket):
        packed = bucket.flat.astype("float16")
        yield bucket.comm.iallreduce(packed, op="mean", out=packed)
        bucket.flat[:] = packed

What a hook leaves out of a step it adds to the next one (error feedback): that part stays on the
rank, and is not in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import InvalidArgument, Unsupported
from .bucket import Bucket
from .chain import chained
from .pins import allocate

__all__ = ["Compress", "TopK", "chained"]


class Kept:
    """What a hook keeps for each bucket, from step to step; forgotten if buckets change."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Bucket, dict[str, Any]]] = {}

    def of(self, bucket: Bucket) -> dict[str, Any]:
        """Give the entry of a bucket."""
        found = self._kept.get(bucket.index)
        if found is None or found[0] is not bucket:
            found = self._kept[bucket.index] = (bucket, {})
        return found[1]


def residual(kept: dict[str, Any], bucket: Bucket) -> np.ndarray:
    """Give what was left out of the last step: at first zeros."""
    if "residual" not in kept:
        kept["residual"] = np.zeros_like(bucket.flat)
    return kept["residual"]


def scratch(kept: dict[str, Any], name: str, bucket: Bucket, count: int, dtype: Any) -> np.ndarray:
    """Give memory for a message in place of a bucket, of the same kind as the bucket's."""
    if name not in kept:
        made = allocate(bucket.comm, count, dtype)
        kept[name] = np.empty(count, dtype) if made is None else made
    return kept[name]


class Compress:
    """Gradients go as float16 or bfloat16.

    Parameters
    ----------
    dtype : {"float16", "bfloat16"}
        bfloat16 needs the package ml_dtypes.  Values beyond 65504 do not fit into float16.
    feedback : bool
        Whether what rounding took off is added to the next step.
    """

    def __init__(self, dtype: str = "float16", feedback: bool = True):
        if dtype not in ("float16", "bfloat16"):
            raise InvalidArgument(f"dtype={dtype!r}: allowed are 'float16' and 'bfloat16'")
        self.feedback = feedback
        self._dtype = _bfloat16() if dtype == "bfloat16" else np.dtype(np.float16)
        self._kept = Kept()

    @chained
    def __call__(self, bucket: Bucket) -> Iterator[Any]:
        """Begin to send."""
        kept, flat = self._kept.of(bucket), bucket.flat
        packed = scratch(kept, "packed", bucket, flat.size, self._dtype)
        if self.feedback:
            flat += residual(kept, bucket)
        packed[...] = flat
        if self.feedback:
            left = np.subtract(flat, packed.astype(flat.dtype), out=residual(kept, bucket))
            if not np.isfinite(left).all():  # an overflow must not come back in every later step
                left[~np.isfinite(left)] = 0
        yield bucket.comm.iallreduce(packed, op="mean", out=packed, algorithm=bucket.algorithm)
        flat[...] = packed


def _bfloat16() -> np.dtype:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise Unsupported("dtype='bfloat16' needs the package ml_dtypes") from None
    return np.dtype(bfloat16)


class TopK:
    """Of each bucket only the largest elements go; the others wait for a later step.

    Parameters
    ----------
    share : float
        Of the elements, in (0, 1]; at least one of a bucket goes.
    """

    def __init__(self, share: float = 0.01):
        if isinstance(share, bool) or not 0 < share <= 1:
            raise InvalidArgument(f"share={share!r}: allowed are numbers in (0, 1]")
        self.share = share
        self._kept = Kept()

    @chained
    def __call__(self, bucket: Bucket) -> Iterator[Any]:
        """Begin to send."""
        flat, left = bucket.flat, residual(self._kept.of(bucket), bucket)
        if flat.size == 0:
            return
        count, size = max(1, math.ceil(self.share * flat.size)), bucket.comm.size
        left += flat
        chosen = np.argpartition(np.abs(left), flat.size - count)[flat.size - count :]
        places = np.empty((size, count), np.int64)
        values = np.empty((size, count), flat.dtype)
        first = bucket.comm.iallgather(chosen[None].astype(np.int64), out=places)
        second = bucket.comm.iallgather(left[chosen][None], out=values)
        left[chosen] = 0
        yield first
        yield second
        flat[...] = 0
        for rank in range(size):  # in this order on every rank: the same bits
            flat[places[rank]] += values[rank]
        flat /= size
