"""Each rank gets the mean of its slice of a bucket, in place of all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .bucket import Bucket


class Scatter:
    """The hook with which each rank gets the mean of its slice of a bucket, and of nothing else.

    Parameters
    ----------
    slices : sequence of slice
        Of each bucket that of this rank.
    counts : sequence of tuple of int
        Of each bucket the elements of every rank's slice.
    algorithms : list of str
        Of the reduce_scatter of each bucket.
    """

    lossless = True
    divides = True

    def __init__(
        self, slices: Sequence[slice], counts: Sequence[tuple[int, ...]], algorithms: list[str]
    ):
        self._slices, self._counts, self.algorithms = slices, counts, algorithms

    def _arguments(self, bucket: Bucket) -> dict[str, Any]:
        return {
            "op": "mean",
            "out": bucket.flat[self._slices[bucket.index]],
            "counts": self._counts[bucket.index],
            "algorithm": self.algorithms[bucket.index],
        }

    def __call__(self, bucket: Bucket) -> Any:
        """Begin in the background."""
        return bucket.comm.ireduce_scatter(bucket.flat, **self._arguments(bucket))

    def blocking(self, bucket: Bucket) -> None:
        """Do it at once."""
        bucket.comm.reduce_scatter(bucket.flat, **self._arguments(bucket))
