"""Buckets divided among ranks: each changes its slices of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..schedule import blocks
from .bucket import Bucket
from .pieces import Piece


class Division:
    """One slice of each bucket for each rank; the parameters' memory moves into buckets.

    Parameters
    ----------
    buckets : sequence of Bucket
        Of the model.
    allocate : callable
        As buckets take it.
    comm : Communicator
        The ranks.

    Attributes
    ----------
    slices : list of slice
        This rank's, of each bucket.
    counts : list of tuple of int
        Elements of every rank's slice, of each bucket.
    values : list of array, 1-D
        The parameters of each bucket.
    pieces : list of Piece
        What this rank has of the parameters.
    """

    def __init__(self, buckets: Sequence[Bucket], allocate: Callable[..., Any], comm: Any):
        cuts = [blocks(bucket.starts[-1], comm.size) for bucket in buckets]
        self.slices = [slice(cut[comm.rank].start, cut[comm.rank].stop) for cut in cuts]
        self.counts = [tuple(block.stop - block.start for block in cut) for cut in cuts]
        self._buckets = buckets
        self.values = [self._adopt(bucket, allocate, comm) for bucket in buckets]
        self.pieces = [piece for k in range(len(buckets)) for piece in self._cut(k)]

    def _adopt(self, bucket: Bucket, allocate: Callable[..., Any], comm: Any) -> Any:
        """Move the parameters of a bucket into one flat array."""
        flat = allocate(bucket.parameters[0], bucket.starts[-1], comm)
        for start, p in zip(bucket.starts, bucket.parameters):
            view = bucket.framework.view(flat, start, p)
            bucket.framework.copy(view, p.data)
            p.data = view
        return flat

    def _cut(self, k: int) -> list[Piece]:
        """Give this rank's pieces of the parameters of a bucket."""
        bucket, mine, values = self._buckets[k], self.slices[k], self.values[k]
        found = []
        for i, (name, p) in enumerate(zip(bucket.names, bucket.parameters, strict=True)):
            begin = bucket.starts[i]
            start, stop = max(mine.start, begin), min(mine.stop, bucket.starts[i + 1])
            if start < stop:
                made = bucket.framework.piece(values, bucket.flat, start, stop)
                found.append(Piece(name, p, made, start - begin, stop - begin, bucket.shapes[i]))
        return found

    def nothing(self) -> Any:
        """Give a piece without elements: optimizers refuse to have nothing to do."""
        return self._buckets[0].framework.piece(self.values[0], self._buckets[0].flat, 0, 0)
