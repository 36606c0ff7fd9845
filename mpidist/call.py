"""One collective call, checked and flattened: what every way of serving it starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .device.array import DeviceArray
from .operations import Op


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
        amount = "" if self.collective == "barrier" else f" {count} x {_name(self.dtype)}"
        # Equal sums may hide unequal parts; of alltoall each rank has its own.
        parts = "" if self.even or self.collective == "alltoall" else f" counts={self.counts}"
        return f"{self.collective}{op}{root}{amount}{parts}"


@lru_cache(maxsize=256)
def _name(dtype: np.dtype) -> str:
    """Give a dtype in words; numpy takes 4 µs for it each time."""
    return str(dtype)


_ROOTED = ("reduce", "broadcast", "gather", "scatter")
