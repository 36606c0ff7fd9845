"""A call that has been checked, and where it comes from: what preparing gives to serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .call import Call
from .errors import InvalidArgument, InvalidRank


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
