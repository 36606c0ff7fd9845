"""Communication hooks: gradients compressed before they are averaged, with error feedback."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..checkpoint.format import read_all
from ..errors import InvalidArgument, Unsupported
from ..frameworks.base import find_dtype
from .bucket import Bucket
from .bucketing import allocate
from .transport import chained

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


__all__ = ["Compress", "PowerSGD", "TopK", "chained"]


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
