"""One drawn call on one rank: which arrays, which arguments, and what must come out, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from sequence_steps import Call

from mpidist import Op

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _last(a, b):
    return b


def _larger(a, b):
    return np.maximum(a, b)


LAST = Op(_last, commute=False, name="last")
LARGER = Op(_larger, commute=True, name="larger")
OF_NUMBERS = ("sum", "max", "mean", "min", "prod", LAST, LARGER, "sum")
OPERATIONS = {
    "f": OF_NUMBERS,
    "i": ("sum", "max", "xor", "min", "prod", LAST, LARGER, "or"),
    "c": ("sum", "mean", "prod", LAST, "sum", "mean", "prod", LAST),
    "b": ("or", "and", "xor", "max", "min", LAST, "or", "xor"),
}


def dtype_of(name: str) -> np.dtype:
    """Give the dtype of a name, also of ml_dtypes."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def value(n: int, dtype: np.dtype, rank: int, salt: int, product: bool = False) -> np.ndarray:
    """Give small whole numbers: sums, and products where asked for, are exact in every dtype."""
    numbers = np.arange(n) * 7 + rank * 3 + salt
    if dtype.kind == "b":
        return numbers % 3 == 0
    return (numbers % 2 + 1 if product else numbers % 5).astype(dtype)


def combined(op: Any, parts: list[np.ndarray]) -> np.ndarray:
    """Give what a reduction of the ranks' arrays must be, to the bit."""
    dtype, rest = parts[0].dtype, parts[1:]
    if op is LAST:
        return parts[-1]
    known = {
        "sum": np.add,
        "mean": np.add,
        "prod": np.multiply,
        "max": np.maximum,
        "min": np.minimum,
        "or": np.bitwise_or,
        "and": np.bitwise_and,
        "xor": np.bitwise_xor,
        LARGER: np.maximum,
    }[op]
    total = parts[0]
    for part in rest:
        total = known(total, part).astype(dtype)
    if op == "mean":
        total = np.true_divide(total, np.asarray(len(parts), dtype)).astype(dtype)
    return total


@dataclass
class Shape:
    """How many elements a call takes and gives on this rank, and at most on any."""

    takes: int
    gives: int
    most: int
    counts: Any = None


class Case:
    """A call of a sequence as rank `rank` of `size` makes it."""

    def __init__(self, call: Call, rank: int, size: int):
        self.call, self.rank, self.size = call, rank, size
        self.root = call.root % size
        self.dtype = dtype_of(call.dtype)
        kind = {"u": "i", "V": "f"}.get(self.dtype.kind, self.dtype.kind)
        self.op = OPERATIONS[kind][call.op]
        self.uneven = bool(call.counts)
        self.table = self.uneven and call.collective == "alltoall"
        self.only_receives = call.collective == "broadcast" and rank != self.root
        self.counts = [call.n] * size
        if self.uneven:
            self.counts = [call.n * w // 3 for w in call.counts[:size]]
        self.shape = getattr(self, f"_{call.collective}")()

    # -- how many elements --------------------------------------------------------------------

    def _allreduce(self):
        return Shape(self.call.n, self.call.n, self.call.n)

    def _reduce(self):
        gives = self.call.n if self.rank == self.root else 0
        return Shape(self.call.n, gives, self.call.n)

    _broadcast = _allreduce

    def _allgather(self):
        total = sum(self.counts)
        return Shape(self.counts[self.rank], total, total, self._given())

    def _gather(self):
        total = sum(self.counts)
        gives = total if self.rank == self.root else 0
        return Shape(self.counts[self.rank], gives, total, self._given())

    def _reduce_scatter(self):
        total = sum(self.counts)
        return Shape(total, self.counts[self.rank], total, self._given())

    def _scatter(self):
        total = sum(self.counts)
        takes = total if self.rank == self.root else 0
        return Shape(takes, self.counts[self.rank], total, self._given())

    def _alltoall(self):
        table = [self._row(r) for r in range(self.size)]
        most = max(max(map(sum, table)), max(map(sum, zip(*table))))
        given = None
        if self.uneven:
            given = table if self.call.salt % 2 else table[self.rank]
        return Shape(sum(table[self.rank]), sum(row[self.rank] for row in table), most, given)

    def _barrier(self):
        return Shape(0, 0, 0)

    def _given(self):
        return self.counts if self.uneven else None

    def _row(self, source: int) -> list[int]:
        """What `source` sends to each rank in alltoall."""
        if not self.uneven:
            return [self.call.n] * self.size
        weights = self.call.counts
        return [self.call.n * weights[(source + 2 * d) % 5] // 3 for d in range(self.size)]

    # -- what goes in and what comes out --------------------------------------------------------

    def data(self, salt: int, rank: int | None = None) -> np.ndarray:
        """Give what a rank brings; this rank if none is named."""
        of = self.rank if rank is None else rank
        takes = Case(self.call, of, self.size).shape.takes
        return value(takes, self.dtype, of, salt, self.op == "prod")

    def expected(self, salt: int) -> np.ndarray | None:
        """Give what this rank must get; None where it gets nothing."""
        name, rank, parts = self.call.collective, self.rank, []
        if name == "barrier" or (name in ("reduce", "gather") and rank != self.root):
            return None
        if name in ("broadcast", "scatter"):
            whole = self.data(salt, self.root)
            return whole if name == "broadcast" else whole[self._mine(self.counts)]
        parts = [self.data(salt, r) for r in range(self.size)]
        if name in ("allgather", "gather"):
            return np.concatenate(parts)
        if name == "alltoall":
            rows = [self._row(r) for r in range(self.size)]
            return np.concatenate([p[self._mine(row)] for p, row in zip(parts, rows)])
        total = combined(self.op, parts)
        return total[self._mine(self.counts)] if name == "reduce_scatter" else total

    def _mine(self, counts: list[int]) -> slice:
        start = sum(counts[: self.rank])
        return slice(start, start + counts[self.rank])

    @property
    def own_part(self) -> slice:
        """Where this rank's part lies in what all parts make up."""
        return self._mine(self.counts)
