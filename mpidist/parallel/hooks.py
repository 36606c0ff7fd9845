"""Communication hooks: fewer bytes for inexact gradients.

A hook is a function of a bucket that gives a Work; when that has ended, ``bucket.flat`` holds the
mean over the ranks, with equal bits on all of them.  :func:`~mpidist.parallel.chain.chained` makes
one of a generator that yields each Work it waits for::

    @chained
    def halved(bucket):
        packed = bucket.flat.astype("float16")
        yield bucket.comm.iallreduce(packed, op="mean", out=packed)
        bucket.flat[:] = packed

What these leave out of a step they add to the next one (:mod:`~mpidist.parallel.feedback`).  A hook
that keeps something from step to step can have it in the state of its :class:`DDP`, with two
methods: ``save(buckets)`` gives what this rank keeps, and ``restore(buckets, states, rank, size)``
takes over what the ranks kept that saved, of which there may have been another number than `size`.
``move(before, after)``, if there is that, takes it along when the first step has told the order of
gradients, and parameters are put into other buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from .bucket import Bucket
from .chain import chained
from .dtypes import find_dtype
from .feedback import Feedback

__all__ = ["Compress", "TopK", "chained"]


class Compress(Feedback):
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
        super().__init__()
        self.feedback = feedback
        self._dtype = find_dtype(dtype)

    @chained
    def __call__(self, bucket: Bucket) -> Iterator[Any]:
        """Begin to send."""
        self.refuse_complex(bucket)
        flat = bucket.flat
        packed = self.scratch("packed", bucket, flat.size, self._dtype)
        if self.feedback:
            flat += self.residual(bucket)
        packed[...] = flat
        if self.feedback:
            np.subtract(flat, packed.astype(flat.dtype), out=self.residual(bucket))
            self.drop_lost(bucket)
        yield bucket.comm.iallreduce(packed, op="mean", out=packed, algorithm=bucket.algorithm)
        flat[...] = packed


class TopK(Feedback):
    """Of each bucket only the largest elements go; the others wait for a later step.

    Parameters
    ----------
    share : float
        Of the elements, in (0, 1]; at least one of a bucket goes.
    """

    def __init__(self, share: float = 0.01):
        if isinstance(share, bool) or not 0 < share <= 1:
            raise InvalidArgument(f"share={share!r}: allowed are numbers in (0, 1]")
        super().__init__()
        self.share = share

    @chained
    def __call__(self, bucket: Bucket) -> Iterator[Any]:
        """Begin to send."""
        flat, left = bucket.flat, self.residual(bucket)
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
        self.drop_lost(bucket)
        yield first
        yield second
        flat[...] = 0
        for rank in range(size):  # in this order on every rank: the same bits
            flat[places[rank]] += values[rank]
        flat /= size
