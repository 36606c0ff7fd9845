"""Where the fastest contender changes along the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from .records import Row

MARGIN = 0.03  # a new one must be faster by so much: what is less is noise


@dataclass(frozen=True)
class Crossover:
    """From `bytes` on `after` is faster than `before`, which was the fastest up to there."""

    bytes: float
    before: str
    after: str


def crossovers(rows: Sequence[Row], margin: float = MARGIN) -> list[Crossover]:
    """Find where the fastest contender of one collective changes.

    The one that was the fastest remains so until another is faster by `margin`; the place is where
    their two curves cross, straight lines between the sizes on log axes.  ``auto`` is left out: it
    is one of the others at every size.

    Parameters
    ----------
    rows : sequence of Row
        Of one collective; wrong results are not looked at.
    margin : float
        Part of the time.

    Returns
    -------
    list of Crossover
        By size.
    """
    times: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.correct and row.algorithm != "auto" and row.bytes > 0 and row.time_us > 0:
            times.setdefault(row.bytes, {})[row.label] = row.time_us
    sizes = sorted(times)
    found: list[Crossover] = []
    fastest = ""
    for k, nbytes in enumerate(sizes):
        here = times[nbytes]
        best = min(here, key=lambda name: here[name])
        if not fastest:
            fastest = best
        elif fastest not in here or here[best] < here[fastest] * (1 - margin):
            if best != fastest:
                found.append(Crossover(_place(times, sizes, k, fastest, best), fastest, best))
            fastest = best
    return found


def _place(
    times: dict[int, dict[str, float]], sizes: list[int], k: int, before: str, after: str
) -> float:
    """Give the size at which the curves of two contenders cross for the last time up to sizes[k].

    Where one of them was not measured, it is the middle between two sizes.
    """

    def lead(n: int) -> float | None:
        here = times[n]
        return log(here[after] / here[before]) if before in here and after in here else None

    right = lead(sizes[k])
    while k > 0:
        left = lead(sizes[k - 1])
        low, high = log(sizes[k - 1]), log(sizes[k])
        if left is None or right is None:
            return exp((low + high) / 2)
        if left >= 0:
            part = left / (left - right) if left > right else 0.5
            return exp(low + part * (high - low))
        k, right = k - 1, left
    return float(sizes[0])
