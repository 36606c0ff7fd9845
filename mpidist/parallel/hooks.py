"""Communication hooks: gradients are compressed before they are averaged, with error feedback.

A hook is a function of a :class:`~mpidist.parallel.Bucket` that starts to send it and returns a
:class:`~mpidist.Work`; when that is complete, ``bucket.flat`` holds the same mean on all ranks.
:func:`chained` makes a hook of a generator function that yields one Work after another.

A hook with a state may have ``save(buckets)``, which returns the state of this rank, and
``restore(buckets, state)``, which takes it over in a resumed run on as many ranks, and
``move(before, after)``, which is called when the same parameters are put into other buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..arguments import whole
from ..checkpoint.state import read_all
from ..errors import InvalidArgument, Unsupported
from ..frameworks.base import find_dtype
from .bucket import Bucket
from .bucketing import allocate
from .transport import chained

__all__ = ["Compress", "PowerSGD", "TopK", "chained"]

RESIDUAL = "residual"


class Feedback:
    """Base class of hooks with error feedback, which keep a state for each bucket.

    The main entry of the state is the residual: what the hook has left out of the gradients so far,
    to be added in the next step.  A bucket's state is freed with the bucket.
    """

    shared: tuple[str, ...] = ()  # further entries of the state that are saved, equal on all ranks
    on_host = True  # gradients must be in host memory

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Bucket, dict[str, Any]] = WeakKeyDictionary()

    def state(self, bucket: Bucket) -> dict[str, Any]:
        """Return the state of a bucket, a dict that the hook may change."""
        return self._states.setdefault(bucket, {})

    def residual(self, bucket: Bucket) -> np.ndarray:
        """Return an array like ``bucket.flat``: what earlier steps did not send of the gradients.

        It has zeros at first, and the hook changes it in place.
        """
        state = self.state(bucket)
        if RESIDUAL not in state:
            state[RESIDUAL] = np.zeros_like(bucket.flat)
        return state[RESIDUAL]

    def drop_lost(self, bucket: Bucket) -> None:
        """Set NaNs and infinities of the residual to zero, or they would return in every step."""
        residual = self.residual(bucket)
        lost = ~np.isfinite(residual)
        if lost.any():
            residual[lost] = 0

    def refuse_complex(self, bucket: Bucket) -> None:
        """Raise Unsupported for a bucket of complex numbers, which the hook cannot compress."""
        if bucket.flat.dtype.kind == "c":
            raise Unsupported(
                f"rank {bucket.comm.rank}: hook={type(self).__name__}: the gradient of "
                f"{bucket.names[0]} is {bucket.flat.dtype}: expected real numbers"
            )

    def scratch(self, name: str, bucket: Bucket, count: int, dtype: Any) -> np.ndarray:
        """Return an array for a bucket's compressed message, kept by `name` from step to step."""
        state = self.state(bucket)
        if name not in state:
            symmetric = allocate(bucket.comm, count, dtype)
            state[name] = np.empty(count, dtype) if symmetric is None else symmetric
        return state[name]

    def move(self, before: Sequence[Bucket], after: Sequence[Bucket]) -> None:
        """Move the residuals of parameters that have changed their bucket."""
        residuals = {
            name: self.state(bucket)[RESIDUAL][start:stop]
            for bucket in before
            if RESIDUAL in self.state(bucket)
            for name, start, stop in zip(bucket.names, bucket.starts, bucket.starts[1:])
        }
        for bucket in after if residuals else ():
            residual = self.residual(bucket)
            for name, start, stop in zip(bucket.names, bucket.starts, bucket.starts[1:]):
                residual[start:stop] = residuals.get(name, 0)

    def save(self, buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
        """Return this rank's state of each bucket: the residual and the `shared` entries."""
        names = (RESIDUAL, *self.shared)
        states = [self.state(bucket) for bucket in buckets]
        return [{name: state[name] for name in names if name in state} for state in states]

    def restore(self, buckets: Sequence[Bucket], state: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`save` returned on this rank, of the same buckets."""
        for bucket, saved in zip(buckets, state, strict=True):
            names = [name for name in (RESIDUAL, *self.shared) if name in saved]
            found = {name: read_all(saved[name]) for name in names}
            if RESIDUAL in found:
                found[RESIDUAL] = np.array(found[RESIDUAL], bucket.flat.dtype)
                if found[RESIDUAL].shape != bucket.flat.shape:
                    raise InvalidArgument(
                        f"rank {bucket.comm.rank}: the state of the hook has "
                        f"{found[RESIDUAL].size} elements for bucket {bucket.index}, which has "
                        f"{bucket.flat.size}"
                    )
            self._states[bucket] = found


class Compress(Feedback):
    """Send gradients as float16 or bfloat16.

    Parameters
    ----------
    dtype : {"float16", "bfloat16"}
        The dtype that is sent; bfloat16 needs the package ml_dtypes.  Values beyond 65504 overflow
        in float16.
    feedback : bool
        Whether the rounding error is added to the gradients of the next step.
    """

    def __init__(self, dtype: str = "float16", feedback: bool = True):
        if dtype not in ("float16", "bfloat16"):
            raise InvalidArgument(f"dtype={dtype!r}: expected 'float16' or 'bfloat16'")
        super().__init__()
        self.feedback = feedback
        self._dtype = find_dtype(dtype)

    @chained
    def __call__(self, bucket: Bucket) -> Iterator[Any]:
        """Start to send a bucket in the smaller dtype, and return the Work."""
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
    """Send the elements of largest magnitude of each bucket; the others are added to later steps.

    Parameters
    ----------
    share : float
        Fraction of a bucket's elements that is sent, in (0, 1]; at least one element.
    """

    def __init__(self, share: float = 0.01):
        if isinstance(share, bool) or not 0 < share <= 1:
            raise InvalidArgument(f"share={share!r}: expected a number in (0, 1]")
        super().__init__()
        self.share = share

    @chained
    def __call__(self, bucket: Bucket) -> Iterator[Any]:
        """Start to send the elements of a bucket with the largest magnitude; return the Work."""
        flat, residual = bucket.flat, self.residual(bucket)
        if flat.size == 0:
            return
        count, size = max(1, math.ceil(self.share * flat.size)), bucket.comm.size
        residual += flat
        chosen = np.argpartition(np.abs(residual), flat.size - count)[flat.size - count :]
        places = np.empty((size, count), np.int64)
        values = np.empty((size, count), flat.dtype)
        # Each rank has chosen other places: an allreduce of the values would add up strangers.
        first = bucket.comm.iallgather(chosen[None].astype(np.int64), out=places)
        second = bucket.comm.iallgather(residual[chosen][None], out=values)
        residual[chosen] = 0
        self.drop_lost(bucket)
        yield first
        yield second
        flat[...] = 0
        for rank in range(size):  # in this order on every rank, for the same bits
            flat[places[rank]] += values[rank]
        flat /= size


class PowerSGD(Feedback):
    """Send each gradient of two or more dimensions as the product of two thin matrices.

    A gradient plus its residual, a matrix M of m rows and n columns (all dimensions after the first
    together), becomes P Qᵀ with P of m × `rank` and Q of n × `rank` numbers (Vogels et al., 2019,
    arXiv:1905.13727).  P = M Q, with the Q of the step before, is averaged and made orthonormal,
    then the new Q = Mᵀ P is averaged.  Vectors, and matrices that would not become smaller, are
    sent whole.

    Parameters
    ----------
    rank : int
        Number of columns of P and Q, > 0.
    seed : int
        Seed of the random Q of the first step; the same on every rank.
    """

    shared = ("right",)

    def __init__(self, rank: int = 2, seed: int = 0):
        super().__init__()
        self.rank, self.seed = whole("rank", rank, 1, "PowerSGD: "), seed

    @chained
    def __call__(self, bucket: Bucket) -> Iterator[Any]:
        """Start to send the factors P and Q of a bucket's matrices, and return the Work."""
        self.refuse_complex(bucket)
        state, flat = self.state(bucket), bucket.flat
        matrices, whole = self._split(bucket)
        right = state.get("right")
        if right is None or [q.shape for q in right] != [(s[1], self.rank) for *_, s in matrices]:
            right = self._first(bucket, matrices)
        residual = self.residual(bucket)
        flat += residual
        # Half precision has too few digits for sums over a matrix's rows.
        wide = np.float64 if flat.itemsize > 4 else np.float32
        inputs = [flat[a:b].reshape(shape).astype(wide) for a, b, shape in matrices]
        left = [m @ q.astype(wide) for m, q in zip(inputs, right, strict=True)]
        sent = self._join(
            "sent", bucket, [*left, *(flat[a:b].astype(wide) for a, b in whole)], wide
        )
        yield bucket.comm.iallreduce(sent, op="mean", out=sent, algorithm=bucket.algorithm)
        parts = _split_flat(sent, [*(p.shape for p in left), *((b - a,) for a, b in whole)])
        left = [_orthogonal(p) for p in parts[: len(left)]]
        products = [m.T @ p for m, p in zip(inputs, left, strict=True)]
        factors = self._join("factors", bucket, products, wide)
        yield bucket.comm.iallreduce(factors, op="mean", out=factors, algorithm=bucket.algorithm)
        right = [q.copy() for q in _split_flat(factors, [q.shape for q in right])]
        state["right"] = right
        if not all(np.isfinite(q).all() for q in right):  # then on all ranks: they are equal
            del state["right"]
        residual[...] = 0
        for (a, b, _), m, p, q in zip(matrices, inputs, left, right, strict=True):
            flat[a:b] = (p @ q.T).reshape(-1)
            residual[a:b] = m.reshape(-1) - flat[a:b]
        self.drop_lost(bucket)
        for (a, b), mean in zip(whole, parts[len(left) :], strict=True):
            flat[a:b] = mean

    def _join(self, name: str, bucket: Bucket, arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
        """Return the concatenation of arrays, in the bucket's scratch array `name`."""
        count = sum(array.size for array in arrays)
        joined = self.scratch(name, bucket, count, dtype)
        np.concatenate([np.empty(0, dtype), *(a.reshape(-1) for a in arrays)], out=joined)
        return joined

    def _split(self, bucket: Bucket) -> tuple[list[Any], list[Any]]:
        """Return (start, stop, shape) of each matrix to be compressed, and (start, stop) of others.

        Start and stop are positions in the bucket's flat buffer; the others are sent whole.
        """
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
        """Return the random right factors Q of the first step, one for each matrix.

        `matrices` is the first result of :meth:`_split`; each Q has `rank` columns.
        """
        random = np.random.default_rng((self.seed, bucket.index))
        return [random.standard_normal((columns, self.rank)) for _, _, (_, columns) in matrices]


def _split_flat(flat: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = np.split(flat, ends[:-1]) if shapes else []
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _orthogonal(columns: np.ndarray) -> np.ndarray:
    """Make columns orthonormal in place (Gram-Schmidt), and return them; a zero column stays."""
    for k in range(columns.shape[1]):
        column = columns[:, k]
        length = math.sqrt(float((column * column).sum()))
        column /= length if length > 1e-30 else 1.0
        # At once, from all columns to come: with rounding they end up closer to orthogonal than if
        # each were projected on those before it.
        rest = columns[:, k + 1 :]
        rest -= np.outer(column, column @ rest)
    return columns
