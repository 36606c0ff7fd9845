"""One drawn call on one rank: which arrays, which arguments, and what must come out, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mpidist import Op
from tests.support.sequence_steps import Call

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype("float16"), BFLOAT16)
RECORD = np.dtype([("id", "i4"), ("place", "f8", (3,)), ("name", "S5")])


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
    "record": (LAST,) * 8,
}


def dtype_of(name: str) -> np.dtype:
    """Give the dtype of a name, also of ml_dtypes."""
    return {"bfloat16": BFLOAT16, "record": RECORD}.get(name) or np.dtype(name)


def value(n: int, dtype: np.dtype, rank: int, salt: int, product: bool = False) -> np.ndarray:
    """Give small whole numbers: sums, and products where asked for, are exact in every dtype."""
    numbers = np.arange(n) * 7 + rank * 3 + salt
    if dtype == RECORD:
        made = np.zeros(n, dtype)
        made["id"], made["place"] = numbers, numbers[:, None] / 8
        made["name"] = [b"%d" % (k % 99_999) for k in numbers]
        return made
    if dtype.kind == "b":
        return numbers % 3 == 0
    return (numbers % 2 + 1 if product else numbers % 5).astype(dtype)


def wild(n: int, dtype: np.dtype, op: Any, rank: int, salt: int) -> np.ndarray | None:
    """Give data that overflow, or with NaN, if the result is exact all the same; else None.

    Integers take all their values; what max and min compare is NaN here and there; the sum of half
    precisions does not fit into them, their mean does.
    """
    random = np.random.default_rng((n, rank, salt))
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return random.integers(bounds.min, bounds.max, n, dtype, endpoint=True)
    if dtype.kind == "b":
        return random.integers(0, 2, n).astype(bool)
    if op in ("max", "min", LARGER) and (dtype.kind == "f" or dtype == BFLOAT16):
        numbers = random.integers(-100, 100, n).astype(dtype)
        numbers[random.random(n) < 0.2] = np.nan
        return numbers
    if op == "mean" and dtype == np.float16:
        return (random.integers(1200, 1500, n) * 32).astype(dtype)
    if op == "mean" and dtype == BFLOAT16:  # as wide as float32, but with 8 bits of precision
        return random.integers(1, 257, n).astype(dtype)
    return None


def alike(got: np.ndarray, expected: np.ndarray, op: Any, size: int) -> bool:
    """Tell whether a result is right: to the bit, but for what an algorithm may choose.

    That is which NaN max and min give; and whether a mean of half precision is added up in float32
    or each of the `size` inputs is divided first, which rounds as often.
    """
    dtype = expected.dtype
    if got.dtype != dtype or got.shape != expected.shape:
        return False
    if got.tobytes() == expected.tobytes():
        return True
    if op == "mean" and dtype in HALVES:
        bound = size * float(ml_dtypes.finfo(dtype).eps)
        return np.allclose(got.astype("f8"), expected.astype("f8"), rtol=bound, atol=0)
    both = (got != got) & (expected != expected)
    return op in ("max", "min", LARGER) and bool(((got == expected) | both).all())


def combined(op: Any, parts: list[np.ndarray]) -> np.ndarray:
    """Give what a reduction of the ranks' arrays must be, to the bit.

    Numpy's rules: integers wrap, max and min of a NaN are NaN.  A mean of half precision is what
    float32 gives: it does not overflow where the sum would.
    """
    dtype, rest = parts[0].dtype, parts[1:]
    if op == "mean" and dtype in HALVES:
        total = sum(part.astype(np.float32) for part in parts)
        return (total / np.float32(len(parts))).astype(dtype)
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


SCALARS = ("allreduce", "reduce", "broadcast", "allgather", "gather")
"""Collectives that take an array of no axis."""
JOINING = ("allgather", "gather")


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
        self.op = OPERATIONS["record" if self.dtype == RECORD else kind][call.op]
        self.uneven = bool(call.counts)
        self.table = self.uneven and call.collective == "alltoall"
        self.scalar = call.layout == "0-d" and call.collective in SCALARS and not self.uneven
        self.n = 1 if self.scalar else call.n
        self.stride = {"strided": 2, "reversed": -1}.get(call.layout, 1)
        self.only_receives = call.collective == "broadcast" and rank != self.root
        self.counts = [self.n] * size
        if self.uneven:
            self.counts = [call.n * w // 3 for w in call.counts[:size]]
        self.shape = getattr(self, f"_{call.collective}")()

    # -- how many elements --------------------------------------------------------------------

    def _allreduce(self):
        return Shape(self.n, self.n, self.n)

    def _reduce(self):
        gives = self.n if self.rank == self.root else 0
        return Shape(self.n, gives, self.n)

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
            return [self.n] * self.size
        weights = self.call.counts
        return [self.call.n * weights[(source + 2 * d) % 5] // 3 for d in range(self.size)]

    # -- what goes in and what comes out --------------------------------------------------------

    def data(self, salt: int, rank: int | None = None) -> np.ndarray:
        """Give what a rank brings; this rank if none is named."""
        of = self.rank if rank is None else rank
        takes = Case(self.call, of, self.size).shape.takes
        made = wild(takes, self.dtype, self.op, of, salt) if self.call.wild else None
        return value(takes, self.dtype, of, salt, self.op == "prod") if made is None else made

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
