"""Medians over launches, geometric means over sizes, and what was to be reached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.plan import MAIN
from mpidist.bench.results import Row, bound_percent

K, M = 1 << 10, 1 << 20
ANY = 1 << 62
BARE = "mpi4py"


@dataclass(frozen=True)
class Key:
    """One cell of the comparison."""

    collective: str
    in_place: bool
    bytes: int
    algorithm: str
    memory: str = "private"
    variant: str = MAIN


@dataclass
class Cell:
    """What all launches measured there; figures are medians over the launches.

    Attributes
    ----------
    times_us : list of float
        One per launch.
    ratio, native_ratio, percent : float or None
        Time of the bare call, and of mpidist's native, in the same launch over this one's; share of
        the 2pS bound.
    """

    times_us: list[float]
    ratio: float | None
    native_ratio: float | None
    percent: float | None
    wrong: int = 0

    @property
    def time_us(self) -> float:
        """The median."""
        return statistics.median(self.times_us)


Cells = dict[Key, Cell]


def merge(runs: Iterable[tuple[str, Mapping[str, Any], Sequence[Row]]]) -> Cells:
    """Merge launches of one MPI and number of ranks.

    Parameters
    ----------
    runs : iterable of (variant, header, rows)
        One per launch.

    Returns
    -------
    dict
        Ratios are taken inside each launch, and their median over the launches.
    """
    found: dict[Key, list[tuple[float, float | None, float | None, float | None, bool]]] = {}
    for variant, header, rows in runs:
        base = {
            (row.collective, row.in_place, row.bytes, row.algorithm): row.time_us
            for row in rows
            if row.memory == "private"
        }
        for row in rows:
            where = row.collective, row.in_place, row.bytes
            key = Key(*where, row.algorithm, row.memory, variant)
            ratios = [
                base[(*where, name)] / row.time_us if (*where, name) in base else None
                for name in (BARE, "native")
            ]
            share = bound_percent(row, header)
            found.setdefault(key, []).append((row.time_us, *ratios, share, row.correct))
    return {key: _cell(values) for key, values in found.items()}


def _cell(values: Sequence[tuple]) -> Cell:
    times, ratios, natives, shares, correct = zip(*values)
    medians = [_median(column) for column in (ratios, natives, shares)]
    return Cell(list(times), *medians, wrong=correct.count(False))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def geometric_mean(values: Sequence[float]) -> float:
    """Give the geometric mean of positive numbers."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def best_bare(cells: Cells, key: Key) -> tuple[str, float] | None:
    """Give the variant under which the bare call was the fastest, and its time."""
    found = {
        other.variant: cell.time_us
        for other, cell in cells.items()
        if other.algorithm == BARE
        and (other.collective, other.in_place, other.bytes)
        == (key.collective, key.in_place, key.bytes)
    }
    return min(found.items(), key=lambda item: item[1]) if found else None


@dataclass(frozen=True, eq=False)
class Target:
    """Something to be reached, over sizes from `low` to `high`.

    Attributes
    ----------
    measure : {"least", "mean", "percent", "least native"}
        The least ratio to the bare call, its geometric mean, the least share of the bound, or the
        least ratio to mpidist's native.
    goals : mapping of int to float
        By number of ranks.
    """

    collective: str
    in_place: bool
    algorithm: str
    memory: str
    low: int
    high: int
    measure: str
    goals: Mapping[int, float]


@dataclass(frozen=True)
class Verdict:
    """How far it was reached: `value`, and for a least one the bytes where it was."""

    target: Target
    goal: float
    value: float
    at: int | None

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.value >= self.goal


def _targets() -> list[Target]:
    always = {2: 0.95, 4: 0.95}
    found = []
    for place in (True, False):
        own = ("allreduce", place, "symmetric", "symmetric")
        found += [
            Target(*own, 64 * K, 64 * M, "least", {2: 1.8, 4: 1.8}),
            Target(*own, 64 * K, 64 * M, "mean", {2: 3.0, 4: 2.8}),
            Target(*own, 16 * M, 64 * M, "percent", {2: 70, 4: 70}),
        ]
    for collective, two, four in (
        ("reduce", 2.5, 2.0),
        ("reduce_scatter", 2.5, 1.8),
        ("allgather", 2.2, 1.8),
        ("broadcast", 1.8, 1.3),
        ("alltoall", 1.6, 1.3),
    ):
        own = (collective, collective == "broadcast", "symmetric", "symmetric")
        found.append(Target(*own, 64 * K, 64 * M, "mean", {2: two, 4: four}))
    for memory in ("symmetric", "private"):
        for collective, place in PLACES:
            own = (collective, place, "auto", memory)
            found.append(Target(*own, 64 * K, ANY, "least", always))
            found.append(Target(*own, 1, 64 * K - 1, "least native", always))
            if memory == "private":
                found.append(Target(*own, 16 * K, M, "mean", {2: 1.3, 4: 1.3}))
    return found


PLACES = (
    ("allreduce", True),
    ("allreduce", False),
    ("reduce", False),
    ("reduce_scatter", False),
    ("allgather", False),
    ("broadcast", True),
    ("alltoall", False),
)
"""What is measured, and whether in place: broadcast always is."""

TARGETS = _targets()


def judge(cells: Cells, ranks: int, targets: Sequence[Target] = tuple(TARGETS)) -> list[Verdict]:
    """See how far the targets for a number of ranks were reached; those without a cell are left."""
    return [
        verdict
        for target in targets
        if ranks in target.goals and (verdict := _judge(cells, target, target.goals[ranks]))
    ]


def _judge(cells: Cells, target: Target, goal: float) -> Verdict | None:
    own = target.collective, target.in_place, target.algorithm, target.memory
    values = {}
    for key, cell in cells.items():
        here = key.collective, key.in_place, key.algorithm, key.memory
        if here != own or key.variant != MAIN or not target.low <= key.bytes <= target.high:
            continue
        column = {"percent": cell.percent, "least native": cell.native_ratio}
        value = column.get(target.measure, cell.ratio)
        if value is not None:
            values[key.bytes] = value
    if not values:
        return None
    if target.measure == "mean":
        return Verdict(target, goal, geometric_mean(list(values.values())), None)
    at = min(values, key=lambda nbytes: values[nbytes])
    return Verdict(target, goal, values[at], at)
