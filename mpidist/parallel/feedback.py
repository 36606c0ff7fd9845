"""Error feedback: what an inexact message leaves out of a step goes into the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import InvalidArgument, Unsupported
from .bucket import Bucket
from .pins import allocate
from .tree import read_all

LEFT = "residual"


class Feedback:
    """What a hook keeps for each bucket, from step to step; it goes when the bucket does.

    Attributes
    ----------
    shared : tuple of str
        Entries that are equal on all ranks, and saved besides what was left out.
    """

    shared: tuple[str, ...] = ()
    on_host = True
    """Needs gradients in host memory."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Bucket, dict[str, Any]] = WeakKeyDictionary()

    def kept(self, bucket: Bucket) -> dict[str, Any]:
        """Give the entry of a bucket."""
        return self._kept.setdefault(bucket, {})

    def residual(self, bucket: Bucket) -> np.ndarray:
        """Give what was left out of the last step: at first zeros."""
        kept = self.kept(bucket)
        if LEFT not in kept:
            kept[LEFT] = np.zeros_like(bucket.flat)
        return kept[LEFT]

    def drop_lost(self, bucket: Bucket) -> None:
        """Forget what is not finite: it must not come back in every later step."""
        left = self.residual(bucket)
        lost = ~np.isfinite(left)
        if lost.any():
            left[lost] = 0

    def refuse_complex(self, bucket: Bucket) -> None:
        """Raise Unsupported if it is one of complex numbers, which have no such short form."""
        if bucket.flat.dtype.kind == "c":
            raise Unsupported(
                f"rank {bucket.comm.rank}: hook={type(self).__name__}: the gradient of "
                f"{bucket.names[0]} is {bucket.flat.dtype}: allowed are real numbers"
            )

    def scratch(self, name: str, bucket: Bucket, count: int, dtype: Any) -> np.ndarray:
        """Give memory for a message in place of a bucket, of the same kind as the bucket's."""
        kept = self.kept(bucket)
        if name not in kept:
            made = allocate(bucket.comm, count, dtype)
            kept[name] = np.empty(count, dtype) if made is None else made
        return kept[name]

    def move(self, before: Sequence[Bucket], after: Sequence[Bucket]) -> None:
        """Take what was left out along to other buckets of the same parameters."""
        left = {
            name: self.kept(bucket)[LEFT][start:stop]
            for bucket in before
            if LEFT in self.kept(bucket)
            for name, start, stop in zip(bucket.names, bucket.starts, bucket.starts[1:])
        }
        for bucket in after if left else ():
            residual = self.residual(bucket)
            for name, start, stop in zip(bucket.names, bucket.starts, bucket.starts[1:]):
                residual[start:stop] = left.get(name, 0)

    def save(self, buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
        """Give what this rank keeps for buckets."""
        names = (LEFT, *self.shared)
        every = [self.kept(bucket) for bucket in buckets]
        return [{name: kept[name] for name in names if name in kept} for kept in every]

    def restore(
        self,
        buckets: Sequence[Bucket],
        states: Sequence[Sequence[Mapping[str, Any]]],
        rank: int,
        size: int,
    ) -> None:
        """Take over what ranks kept, when there were as many as `states`.

        On another number of ranks each state goes to one of them, scaled so that the mean over the
        ranks of what is to be made up for stays what it was.

        Raises
        ------
        InvalidArgument
            If it is not for these buckets.
        """
        mine, scale = states[rank::size], size / len(states)
        for k, bucket in enumerate(buckets):
            first = states[0][k]
            kept = {name: read_all(first[name]) for name in self.shared if name in first}
            for state in mine:
                if LEFT in state[k]:
                    left = np.array(read_all(state[k][LEFT]), bucket.flat.dtype)
                    kept[LEFT] = kept[LEFT] + left if LEFT in kept else left
            if LEFT in kept and kept[LEFT].shape != bucket.flat.shape:
                raise InvalidArgument(
                    f"rank {rank}: the state of a hook has {kept[LEFT].size} elements for bucket "
                    f"{k}, which has {bucket.flat.size}"
                )
            if LEFT in kept and scale != 1:
                kept[LEFT] *= scale
            self._kept[bucket] = kept
