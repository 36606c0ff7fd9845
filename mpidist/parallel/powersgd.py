"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019): gradients as products of thin matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from .bucket import Bucket
from .chain import chained
from .feedback import Feedback


class PowerSGD(Feedback):
    """Each gradient of two or more dimensions goes as a product of two matrices of `rank` columns.

    Parameters
    ----------
    rank : int
        > 0.  Gradients whose factors would have as many elements as they have go whole, as do
        vectors.
    seed : int
        Of the first right factors; the same on every rank.
    """

    shared = ("right",)

    def __init__(self, rank: int = 2, seed: int = 0):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidArgument(f"rank={rank!r}: allowed are whole numbers > 0")
        super().__init__()
        self.rank, self.seed = rank, seed

    @chained
    def __call__(self, bucket: Bucket) -> Iterator[Any]:
        """Begin to send."""
        self.refuse_complex(bucket)
        kept, flat = self.kept(bucket), bucket.flat
        matrices, whole = self._cut(bucket)
        right = kept.get("right")
        if right is None or [q.shape for q in right] != [(s[1], self.rank) for *_, s in matrices]:
            right = self._first(bucket, matrices)
        left_out = self.residual(bucket)
        flat += left_out
        wide = np.float64 if flat.itemsize > 4 else np.float32
        inputs = [flat[a:b].reshape(shape).astype(wide) for a, b, shape in matrices]
        left = [m @ q.astype(wide) for m, q in zip(inputs, right, strict=True)]
        sent = self._join(
            "sent", bucket, [*left, *(flat[a:b].astype(wide) for a, b in whole)], wide
        )
        yield bucket.comm.iallreduce(sent, op="mean", out=sent, algorithm=bucket.algorithm)
        parts = _cut_up(sent, [*(p.shape for p in left), *((b - a,) for a, b in whole)])
        left = [_orthogonal(p) for p in parts[: len(left)]]
        products = [m.T @ p for m, p in zip(inputs, left, strict=True)]
        factors = self._join("factors", bucket, products, wide)
        yield bucket.comm.iallreduce(factors, op="mean", out=factors, algorithm=bucket.algorithm)
        right = [q.copy() for q in _cut_up(factors, [q.shape for q in right])]
        kept["right"] = right
        if not all(np.isfinite(q).all() for q in right):  # the next step begins anew, on all ranks
            del kept["right"]
        left_out[...] = 0
        for (a, b, _), m, p, q in zip(matrices, inputs, left, right, strict=True):
            flat[a:b] = (p @ q.T).reshape(-1)
            left_out[a:b] = m.reshape(-1) - flat[a:b]
        self.drop_lost(bucket)
        for (a, b), mean in zip(whole, parts[len(left) :], strict=True):
            flat[a:b] = mean

    def _join(self, name: str, bucket: Bucket, arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
        """Give arrays one after another, in memory for a message."""
        count = sum(array.size for array in arrays)
        joined = self.scratch(name, bucket, count, dtype)
        np.concatenate([np.empty(0, dtype), *(a.reshape(-1) for a in arrays)], out=joined)
        return joined

    def _cut(self, bucket: Bucket) -> tuple[list[Any], list[Any]]:
        """Give the matrices, and what goes whole."""
        matrices, whole = [], []
        for a, b, shape in zip(bucket.starts, bucket.starts[1:], bucket.shapes):
            rows = shape[0] if shape else 1
            columns = math.prod(shape[1:])
            if len(shape) < 2 or (rows + columns) * self.rank >= rows * columns:
                whole.append((a, b))
            else:
                matrices.append((a, b, (rows, columns)))
        return matrices, whole

    def _first(self, bucket: Bucket, matrices: list[Any]) -> list[np.ndarray]:
        """Give right factors to begin with."""
        random = np.random.default_rng((self.seed, bucket.index))
        return [random.standard_normal((columns, self.rank)) for _, _, (_, columns) in matrices]


def _cut_up(flat: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = np.split(flat, ends[:-1]) if shapes else []
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _orthogonal(columns: np.ndarray) -> np.ndarray:
    """Make columns orthonormal, one after another (Gram-Schmidt); a zero column stays zero."""
    for k in range(columns.shape[1]):
        column = columns[:, k]
        length = math.sqrt(float((column * column).sum()))
        column /= length if length > 1e-30 else 1.0
        rest = columns[:, k + 1 :]
        rest -= np.outer(column, column @ rest)
    return columns
