"""One entry of a tuning table: for which calls it holds, what to take, and the times behind it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from .call import Call
from .operations import kind_of

PRIVATE, SYMMETRIC = "private", "symmetric"
MEMORIES = (PRIVATE, SYMMETRIC)
KINDS = ("any", "float", "half", "int", "bool", "complex")
"""Classes of dtypes: "any" where nothing is combined, "half" for floats of two bytes or less."""

Times = Mapping[int, Mapping[str, float]]


def kind_for(call: Call) -> str:
    """Give the class of dtypes that a call is tuned with."""
    if call.op is None:
        return "any"
    kind = kind_of(call.dtype)
    return "half" if kind == "float" and call.dtype.itemsize <= 2 else kind


@dataclass(frozen=True, order=True)
class Key:
    """What an entry was measured for.

    Attributes
    ----------
    library : str
        The MPI library and its version.
    ranks_per_node : tuple of int
        Ranks on each node.
    kind : str
        One of :data:`KINDS`.
    collective : str
        Which.
    memory : str
        Where the arrays are: one of :data:`MEMORIES`.
    """

    library: str
    ranks_per_node: tuple[int, ...]
    kind: str
    collective: str
    memory: str


@dataclass(frozen=True)
class Entry:
    """What to take for one key, and the times that say so.

    Attributes
    ----------
    choose : tuple of (int, str)
        The way from so many bytes on, ascending; the first from 0.
    times : mapping
        Seconds of each candidate, by bytes; those that were clearly slower may be missing.
    """

    key: Key
    choose: tuple[tuple[int, str], ...]
    times: Times

    @classmethod
    def from_points(cls, key: Key, chosen: Mapping[int, str], times: Times) -> Entry:
        """Make the entry of ways that were chosen at some sizes.

        Between two sizes it changes from one way to the other where their times, interpolated on
        logarithmic axes, cross; in the middle if one of them was not measured at both.
        """
        sizes = sorted(chosen)
        choose = [(0, chosen[sizes[0]])]
        for low, high in zip(sizes, sizes[1:]):
            before, after = chosen[low], chosen[high]
            if before != after:
                choose.append((_crossing(low, high, before, after, times), after))
        return cls(key, tuple(choose), times)

    def at(self, nbytes: int) -> tuple[str, int, float]:
        """Give the way for `nbytes`, and the bytes from which and below which it is taken.

        Below the smallest and above the largest size that was measured, the way is that of it.
        """
        index = bisect_right([first for first, _ in self.choose], nbytes) - 1
        above = self.choose[index + 1][0] if index + 1 < len(self.choose) else math.inf
        return self.choose[index][1], self.choose[index][0], above

    def seconds(self, way: str, nbytes: int) -> float | None:
        """Give the time of a way by interpolation on logarithmic axes; None if not measured.

        Below the smallest size it is that of the smallest, above the largest in proportion.
        """
        known = sorted((size, times[way]) for size, times in self.times.items() if way in times)
        if not known:
            return None
        if nbytes <= known[0][0]:
            return known[0][1]
        for (low, first), (high, second) in zip(known, known[1:]):
            if nbytes <= high:
                part = math.log(nbytes / max(low, 1)) / math.log(high / max(low, 1))
                return first * (second / first) ** part
        size, last = known[-1]
        return last * nbytes / max(size, 1)


def _crossing(low: int, high: int, before: str, after: str, times: Times) -> int:
    part, first, second = 0.5, times.get(low, {}), times.get(high, {})
    if all(way in at for way in (before, after) for at in (first, second)):
        ahead = math.log(first[after] / first[before])  # of `before`, at the lower size
        behind = math.log(second[before] / second[after])
        if ahead >= 0 and behind >= 0 and ahead + behind > 0:
            part = ahead / (ahead + behind)
    edge = max(low, 1) * (high / max(low, 1)) ** part
    return min(max(math.ceil(edge), low + 1), high)  # what was measured keeps its own way
