"""Test data of the benchmarks: inputs that change before every call, and the expected results.

All data are windows of one pseudo-random sequence g of small whole numbers.  A *turn* moves every
window on by one element, on all ranks alike, so that no call finds the result of an earlier one.
In reductions rank r contributes g[t+7r …], so the result is a window of E[i] = g[i] ∘ g[i+7] ∘
g[i+14] ∘ …, with an operand for each rank that contributes, computed once.  Filling and checking
are one pass over memory each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InvalidArgument, InvalidRank, Unsupported
from ..frameworks.base import find_dtype
from ..operations import Op, check_defined, divides_first, division, find_op, is_mean, kind_of
from ..schedule.contract import COLLECTIVES

BARE = "mpi4py"  # name of the bare mpi4py call among the candidates

SPAN = 251  # different numbers in the sequence, where sums of them are exact
_PERIOD = 65521  # a prime: no block's length is a multiple of it


def number_dtype(name: str) -> np.dtype:
    """Return the dtype with this name, whose elements must be numbers or bool."""
    try:
        dtype = find_dtype(name)
    except (InvalidArgument, Unsupported):
        dtype = np.dtype(object)
    if kind_of(dtype) == "other":
        raise InvalidArgument(
            f"dtype {name!r}: expected bool, int8 … int64, uint8 … uint64, float16, float32, "
            "float64, complex64, complex128, or one of ml_dtypes (bfloat16), if it is installed"
        )
    return dtype


def span(dtype: np.dtype, size: int, op: str) -> int:
    """Return how many values 0, 1, 2, … an input may have so that `op` over `size` ranks is exact.

    Sums of integers may wrap around, which is the same in any order.
    """
    kind = kind_of(dtype)
    if kind == "bool" or op == "prod":
        return 2
    if kind == "int":  # sums that overflow wrap around, everywhere alike
        return min(SPAN, 2 ** (8 * dtype.itemsize - 1) - 1)
    whole = 2 ** (1 + mantissa_bits(dtype))
    step = size if divides_first(find_op(op), dtype) else 1  # see `sequence`
    return max(2, min(SPAN, whole // (size * step) + 1))


def mantissa_bits(dtype: np.dtype) -> int:
    """Return the number of bits in the fraction of a floating-point dtype."""
    try:
        return int(np.finfo(dtype).nmant)
    except ValueError:  # numpy does not know those of ml_dtypes
        import ml_dtypes

        return int(ml_dtypes.finfo(dtype).nmant)


def sequence(length: int, span: int, dtype: np.dtype, op: str, size: int) -> np.ndarray:
    """Return `length` pseudo-random whole numbers in 0 … span - 1, or in 1 … span for products.

    Products of bool have numbers in 0 … span - 1, too.  For a mean in half precision, which divides
    each operand by `size` before the sum, the numbers are multiplied by `size`.
    """
    steps = np.arange(_PERIOD, dtype=np.uint64)
    mixed = (steps * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    numbers = (mixed >> np.uint64(9)) % np.uint64(span)
    if op == "prod" and dtype.kind != "b":
        numbers = numbers + np.uint64(1)
    if divides_first(find_op(op), dtype):
        numbers = numbers * np.uint64(size)
    return np.resize(numbers.astype(dtype), length)


def combine(op: Op, g: np.ndarray, size: int, length: int, stride: int) -> np.ndarray:
    """Return g[i] ∘ g[i+stride] ∘ … (`size` operands, ∘ is `op`) for each i from 0 to `length` - 1.

    For a mean, the sum is divided by `size`.
    """
    result = g[:length].copy()
    for rank in range(1, size):
        op.combine(result, g[stride * rank : stride * rank + length], result)
    if is_mean(op):
        division(result, size)()
    return result


def rounded_total(
    g: np.ndarray, size: int, length: int, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and largest correct sums g[i] + g[i+stride] + … for each i below `length`.

    Each sum has `size` (p) operands, rounded in g's dtype.  Each of the p-1 additions rounds by
    at most half a unit in the last place of a partial sum, and no partial sum exceeds the sum of
    magnitudes, whatever the order (Higham 2002, §4.2).
    """
    windows = [g[stride * r : stride * r + length].astype(np.float64) for r in range(size)]
    exact = np.sum(windows, axis=0)
    magnitude = np.sum([np.abs(w) for w in windows], axis=0)
    slack = magnitude * max(size - 1, 1) * float(np.finfo(g.dtype).eps)
    return (exact - slack).astype(g.dtype), (exact + slack).astype(g.dtype)


STRIDE = 7  # between the windows of two ranks

# For each collective one of the functions below sets the arrays and the windows of a case::
#
#     g       the numbers of the inputs
#     e       the combined numbers, E of this module's docstring; g where nothing is combined
#     part    elements of each rank's part of the whole buffer
#
# The window (memory, sequence, start) says that `memory` holds the numbers of the sequence g or e
# from index `start` on: before the call if it is one of case.sources, after a correct one if it is
# one of case.expected.  Turn t begins t % TURNS numbers later.

Bounds = tuple[np.ndarray, np.ndarray]
Window = tuple[np.ndarray, np.ndarray, int]  # memory, sequence, start in the sequence


def _whole_reduction(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    case.sources = [(case.x, g, STRIDE * case.rank)]
    if COLLECTIVES[case.collective].output_blocks(case.rank, case.size, case.root, 1):
        case.expected = [(case.out, e, 0)]
    else:
        case.out = None


def _reduce_scatter(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = case.rank * part
    assert case.x is not None and case.out is not None
    case.sources = [(case.x, g, STRIDE * case.rank)]
    case.out = case.out[begin : begin + part] if case.in_place else case.out[:part]
    case.expected = [(case.out, e, begin)]
    if case.in_place:  # MPI leaves the result in front, mpidist at the part of this rank
        case.bare_expected = [(case.x[:part], e, begin)]


def _broadcast(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = STRIDE * case.root
    if case.rank == case.root:
        case.sources = [(case.x, g, begin)]
    case.out, case.expected = None, [(case.x, g, begin)]


def _allgather(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = case.rank * part
    assert case.x is not None
    case.x = case.x[begin : begin + part] if case.in_place else case.x[:part]
    case.sources = [(case.x, g, begin)]
    case.expected = [(case.out, g, 0)]


def _gather(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = case.rank * part
    assert case.x is not None
    case.x = _own_part(case, case.x, part)
    case.sources = [(case.x, g, begin)]
    case.expected = [(case.out, g, 0)]
    if case.rank != case.root:
        case.out, case.expected = None, []


def _scatter(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = case.rank * part
    assert case.out is not None
    case.out = _own_part(case, case.out, part)
    case.expected = [(case.out, g, begin)]
    if case.rank == case.root:
        case.sources = [(case.x, g, 0)]
    else:
        case.x = None


def _own_part(case: Case, memory: np.ndarray, part: int) -> np.ndarray:
    """Return a view of the `part` elements of `memory` that this rank contributes or receives.

    They are the first ones; in place on the root, the root's part of the whole buffer.
    """
    begin = case.root * part if case.in_place and case.rank == case.root else 0
    return memory[begin : begin + part]


def _alltoall(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    assert case.x is not None and case.out is not None
    r, p = case.rank, case.size
    for peer in range(p):
        rows = slice(peer * part, (peer + 1) * part)
        case.sources.append((case.x[rows], g, STRIDE * (r * p + peer)))
        case.expected.append((case.out[rows], g, STRIDE * (peer * p + r)))


def _barrier(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    case.x = case.out = None


LAYOUT = {
    "allreduce": _whole_reduction,
    "reduce": _whole_reduction,
    "scan": _whole_reduction,
    "exscan": _whole_reduction,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "barrier": _barrier,
}
"""For each collective, a function (case, g, e, part) that sets the case's arrays and windows."""

TURNS = 61  # turns before the windows repeat

_CHUNK = 1 << 15  # elements that are checked at a time, so that both operands stay in the cache


@dataclass
class Case:
    """The arrays and expected result of one collective of one size, on one rank.

    A case's windows are (memory, sequence, start): at turn t the memory holds the numbers of the
    sequence from index start + t % `TURNS` on.
    """

    collective: str
    rank: int
    size: int
    root: int
    op: Op | None
    x: Any  # argument of the call; None where this rank passes none
    out: Any  # as x
    nbytes: int  # of the whole buffer
    in_place: bool
    sources: list[Window] = field(default_factory=list)  # to fill before a call
    expected: list[Window] = field(default_factory=list)  # to check after it
    # After the bare mpi4py call, where MPI puts the result elsewhere.
    bare_expected: list[Window] | None = None
    # Least and largest correct value at each index of the results; None if results are exact.
    bounds: Bounds | None = None

    def fill(self, turn: int) -> None:
        """Write the input of call number `turn`, which selects the data, into the input memory."""
        at = turn % TURNS
        for memory, numbers, begin in self.sources:
            np.copyto(memory, numbers[begin + at : begin + at + memory.size])

    def check(self, turn: int, bare: bool = False) -> bool:
        """Return whether the result of call number `turn` is correct on this rank.

        `bare` says that the bare mpi4py call made it, whose result may be at another place.
        """
        at = turn % TURNS
        windows = self.bare_expected if bare and self.bare_expected is not None else self.expected
        return all(
            self._right(memory[k : k + _CHUNK], begin + at + k, numbers)
            for memory, numbers, begin in windows
            for k in range(0, memory.size, _CHUNK)
        )

    def result(self, bare: bool = False) -> list[np.ndarray]:
        """Return the result on this rank as arrays of words of 8 bytes (shorter ones, of bytes).

        Bytes behind the last whole word are left out.  `bare` is that of :meth:`check`.
        """
        if self.out is not None and not (bare and self.bare_expected is not None):
            memories = [self.out]
        else:
            windows = self.expected if self.bare_expected is None else self.bare_expected
            memories = [memory for memory, _, _ in windows]
        flat = [memory.view(np.uint8) for memory in memories if memory.size]
        return [x if x.size < 8 else x[: x.size // 8 * 8].view(np.int64) for x in flat]

    def _right(self, memory: np.ndarray, at: int, numbers: np.ndarray) -> bool:
        window = slice(at, at + memory.size)
        if self.bounds is None:
            return bool((memory == numbers[window]).all())
        low, high = self.bounds
        return bool((memory >= low[window]).all() and (memory <= high[window]).all())


class Workload:
    """Test data of one collective on one rank, for buffers of every size up to `largest`.

    The input is pseudo-random whole numbers, so that results are exact; with `data`, these real
    numbers, repeated as often as needed: a sum may then differ from the exact one by its rounding.
    """

    def __init__(
        self,
        collective: str,
        rank: int,
        size: int,
        root: int,
        largest: int,
        dtype: Any,
        op: str = "sum",
        in_place: bool = False,
        data: np.ndarray | None = None,
    ):
        self.collective, self.rank, self.size, self.root = collective, rank, size, root
        self.dtype, self.in_place = np.dtype(dtype), in_place or collective == "broadcast"
        if not 0 <= root < size:
            raise InvalidRank(root, size, "root", rank)
        self._turn = 0
        contract = COLLECTIVES[collective]
        self.op = find_op(op) if contract.reduces and not contract.idempotent else None
        if self.op is not None:
            check_defined(self.op, self.dtype, rank)
        count = self.count(largest)
        extra = TURNS + STRIDE * size * (size if collective == "alltoall" else 1)
        self.memory = np.zeros(count, self.dtype)
        self.other = np.zeros(0 if self.in_place else count, self.dtype)
        if data is not None:
            self.g = np.resize(data.astype(self.dtype, copy=False), count + extra)
        else:
            self.g = sequence(count + extra, span(self.dtype, size, op), self.dtype, op, size)
        self.bounds: Bounds | None = None
        if self.op is None:
            self.e = self.g
            return
        assert contract.contributions is not None
        ranks = contract.contributions(rank, size) or range(1)  # without any there is no result
        first = self.g[STRIDE * ranks.start :]
        if data is not None:
            self.bounds = rounded_total(first, len(ranks), count + TURNS, STRIDE)
            self.e = self.bounds[0]
        else:
            self.e = combine(self.op, first, len(ranks), count + TURNS, STRIDE)

    def elsewhere(self, empty: Callable[[int, np.dtype], np.ndarray]) -> Workload:
        """Return a copy of the workload on new buffers from `empty`, with the same input data.

        ``empty(count, dtype)`` allocates an array, as ``comm.empty`` does.
        """
        other = copy.copy(self)
        other.memory = empty(self.memory.size, self.dtype)
        other.other = empty(self.other.size, self.dtype)
        return other

    def next_turn(self) -> int:
        """Return the number of the next call (its turn), which selects the data: 1, 2, 3, …."""
        self._turn += 1
        return self._turn

    def count(self, nbytes: int) -> int:
        """Return the number of elements of a whole buffer of at least `nbytes`; 0 for a barrier.

        It is a multiple of the number of ranks where each rank has a part of the buffer.
        """
        count = -(-nbytes // self.dtype.itemsize)
        if COLLECTIVES[self.collective].per_rank:
            count = -(-count // self.size) * self.size
        return 0 if self.collective == "barrier" else count

    def case(self, nbytes: int) -> Case:
        """Return the case of a whole buffer of `nbytes`, rounded up as in :meth:`count`.

        All cases of a workload share its memory, so one is used at a time.
        """
        n = self.count(nbytes)
        case = Case(
            self.collective,
            self.rank,
            self.size,
            self.root,
            self.op,
            self.memory[:n],
            self.memory[:n] if self.in_place else self.other[:n],
            n * self.dtype.itemsize,
            self.in_place,
            bounds=self.bounds,
        )
        LAYOUT[self.collective](case, self.g, self.e, n // self.size)
        return case
