"""One collective call, checked and flattened: the input of every executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..device.array import DeviceArray
from ..errors import InvalidArgument, InvalidRank
from ..operations import TREE, Op
from ..schedule.contract import COLLECTIVES


@dataclass(slots=True)
class Prepared:
    """A call, and the result to return when it has been served."""

    call: Call
    result: Any  # numpy array, DeviceArray, or None
    # A flat array that the call fills where it cannot fill `result`, to which it is copied at last.
    staging: np.ndarray | None = None
    scalar: bool = False  # return a numpy scalar, as numpy does for 0-d results without `out`
    shown: Any = None  # to return in place of `result`, on its memory: the user's `out`, a tensor
    fresh: bool = False  # the result's memory was made for this call: no later call writes there

    def gives(self, x: Any, out: Any) -> bool:
        """Return whether :meth:`give` copies nothing, and returns `x`, `out` or None."""
        result = self.result if self.shown is None else self.shown
        return result is None or (
            self.staging is None and not self.scalar and (result is out or result is x)
        )

    def give(self) -> Any:
        """Return the user's result, after copying `staging` to it where there is one."""
        result = self.result
        if type(result) is DeviceArray:
            return result.owner
        if self.staging is not None:
            assert result is not None
            result[...] = self.staging.reshape(result.shape)
        if self.shown is not None:
            return self.shown
        return result[()] if self.scalar and result is not None else result


@dataclass(frozen=True)
class Caller:
    """Rank and size of the caller of a collective, to check arguments and to name in errors."""

    rank: int
    size: int

    def check_root(self, root: Any) -> int:
        """Return `root` as an int, or raise `InvalidRank`."""
        return self.check_rank(root, "root")

    def check_rank(self, rank: Any, argument: str) -> int:
        """Return `rank` as an int, or raise `InvalidRank`."""
        if isinstance(rank, (bool, np.bool_)) or not isinstance(rank, (int, np.integer)):
            raise InvalidRank(rank, self.size, argument, self.rank)
        if not 0 <= rank < self.size:
            raise InvalidRank(int(rank), self.size, argument, self.rank)
        return int(rank)

    def wrong(self, message: str) -> InvalidArgument:
        """Return an InvalidArgument error with this rank and `message`."""
        return InvalidArgument(f"rank {self.rank}: {message}")


@dataclass(slots=True)
class Call:
    """A collective call with its arrays; :func:`dataclasses.replace` copies it with other arrays.

    `x` and `out` are flat and contiguous numpy arrays, or both DeviceArrays; None where this rank
    has no input, or no result.
    """

    collective: str
    rank: int
    size: int
    root: int  # 0 where the collective has none
    dtype: np.dtype
    x: Any
    out: Any
    op: Op | None = None
    counts: tuple[int, ...] = ()  # elements of each rank's part; of alltoall, of each part sent
    out_counts: tuple[int, ...] = ()  # of alltoall, of each part received; else `counts`
    in_place: bool = False  # x and out are the same memory, or one is a part of the other
    even: bool = True  # all counts are equal
    agreed: str = ""  # further text that must be equal on all ranks: a shape, a table of counts
    total: int = 0  # of uneven alltoall: elements that all ranks send, which every rank knows
    count: int = field(init=False)  # elements of the whole buffer, alike on all but uneven alltoall
    nbytes: int = field(init=False)  # of the whole buffer, as in nccl-tests
    on_device: bool = field(init=False)  # the arrays are on a GPU
    uneven_alltoall: bool = field(init=False)  # two ranks only know how much goes between them

    def __post_init__(self) -> None:
        data = self.out if self.x is None else self.x
        count = sum(self.counts) if self.counts else 0 if data is None else data.size
        self.count, self.nbytes = count, count * self.dtype.itemsize
        self.on_device = type(data) is DeviceArray
        self.uneven_alltoall = self.collective == "alltoall" and not self.even

    @property
    def gives_input(self) -> bool:
        """Whether the result is the input as it is, which may be read-only: a broadcast's root."""
        return self.in_place and self.collective == "broadcast" and self.rank == self.root

    @property
    def signature(self) -> str:
        """Text that describes the call and must be equal on all ranks."""
        op = f" op={self.op.name}" if self.op is not None else ""
        if self.op is not None and self.op.grouping == TREE:
            op += f" order={TREE}"
        root = f" root={self.root}" if COLLECTIVES[self.collective].rooted else ""
        count = "uneven" if self.uneven_alltoall else self.count
        amount = "" if self.collective == "barrier" else f" {count} x {words_of(self.dtype)}"
        # Equal sums may hide unequal parts; of alltoall each rank has its own.
        parts = "" if self.even or self.collective == "alltoall" else f" counts={self.counts}"
        return f"{self.collective}{op}{root}{amount}{parts}{self.agreed}"


@lru_cache(maxsize=256)
def words_of(dtype: np.dtype) -> str:
    """Return the text of a dtype, by which ranks compare dtypes (cached: numpy takes 4 µs)."""
    plain = np.dtype((np.void, dtype)) if dtype.type is np.record else dtype  # they are equal
    return str(plain)
