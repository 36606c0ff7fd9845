"""One collective call, checked and flattened: what every way of serving it starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..device.array import DeviceArray
from ..errors import InvalidArgument, InvalidRank
from ..operations import Op


@dataclass(slots=True)
class Prepared:
    """A call and what to give back when it has been served.

    Attributes
    ----------
    call : Call
        The call.
    result : ndarray, DeviceArray or None
        The array to return.
    shown : object, optional
        Returned instead of `result`, whose memory it has: the user's own `out`, or a tensor.
    staging : ndarray or None
        The flat result where `result` is not contiguous; copied over at the end.
    scalar : bool
        Return a numpy scalar, as numpy does for 0-d results without `out`.
    """

    call: Call
    result: Any
    staging: np.ndarray | None = None
    scalar: bool = False
    shown: Any = None

    def give(self) -> Any:
        """Give the user's result."""
        result = self.result
        if self.staging is not None:
            assert result is not None
            result[...] = self.staging.reshape(result.shape)
        if self.shown is not None:
            return self.shown
        return result[()] if self.scalar and result is not None else result


@dataclass(frozen=True)
class Place:
    """Who asks: rank and size."""

    rank: int
    size: int

    def check_root(self, root: Any) -> int:
        """Give `root` if it is a rank."""
        return self.check_rank(root, "root")

    def check_rank(self, rank: Any, argument: str) -> int:
        """Give `rank` if it is one."""
        if isinstance(rank, (bool, np.bool_)) or not isinstance(rank, (int, np.integer)):
            raise InvalidRank(rank, self.size, argument, self.rank)
        if not 0 <= rank < self.size:
            raise InvalidRank(int(rank), self.size, argument, self.rank)
        return int(rank)

    def wrong(self, message: str) -> InvalidArgument:
        """Make an error that names this rank."""
        return InvalidArgument(f"rank {self.rank}: {message}")


@dataclass(slots=True)
class Call:
    """A collective with its arrays.

    Attributes
    ----------
    collective : str
        Which.
    rank, size, root : int
        Of the communicator; root is 0 where there is none.
    dtype : numpy.dtype
        Of the elements.
    x, out : ndarray, DeviceArray or None
        Flat contiguous arrays, both on the host or both on a GPU: what this rank brings and what it
        gets; None where it has no part.
    op : Op or None
        For collectives that reduce.
    counts : tuple of int
        Elements of each rank's part; for alltoall, what this rank sends to each.
    out_counts : tuple of int
        For alltoall, what this rank gets from each; else equal to `counts`.
    in_place : bool
        `x` and `out` are the same memory (or `x` is this rank's part of `out`, or the reverse).
    even : bool
        All counts are equal.
    agreed : str
        What else must be equal on all ranks, in words: a shape, a table of counts.
    """

    collective: str
    rank: int
    size: int
    root: int
    dtype: np.dtype
    x: Any
    out: Any
    op: Op | None = None
    counts: tuple[int, ...] = ()
    out_counts: tuple[int, ...] = ()
    in_place: bool = False
    even: bool = True
    agreed: str = ""

    @property
    def count(self) -> int:
        """Elements of the whole buffer, the same on every rank (but for uneven alltoall)."""
        if self.counts:
            return sum(self.counts)
        data = self.x if self.x is not None else self.out
        return 0 if data is None else data.size

    @property
    def on_device(self) -> bool:
        """Whether the arrays are on a GPU."""
        return type(self.x) is DeviceArray or type(self.out) is DeviceArray

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, as in nccl-tests."""
        return self.count * self.dtype.itemsize

    @property
    def uneven_alltoall(self) -> bool:
        """Whether the ranks differ in how much they send, and none knows the others' amounts."""
        return self.collective == "alltoall" and not self.even

    @property
    def fingerprint(self) -> str:
        """What must be equal on all ranks, in words."""
        op = f" op={self.op.name}" if self.op is not None else ""
        root = f" root={self.root}" if self.collective in _ROOTED else ""
        count = "uneven" if self.uneven_alltoall else self.count
        amount = "" if self.collective == "barrier" else f" {count} x {words_of(self.dtype)}"
        # Equal sums may hide unequal parts; of alltoall each rank has its own.
        parts = "" if self.even or self.collective == "alltoall" else f" counts={self.counts}"
        return f"{self.collective}{op}{root}{amount}{parts}{self.agreed}"


@lru_cache(maxsize=256)
def words_of(dtype: np.dtype) -> str:
    """Return the words by which ranks compare a dtype; kept, for numpy takes 4 µs each time."""
    plain = np.dtype((np.void, dtype)) if dtype.type is np.record else dtype  # they are equal
    return str(plain)


_ROOTED = ("reduce", "broadcast", "gather", "scatter")
