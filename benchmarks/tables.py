"""Medians over launches, geometric means over sizes, the goals, and the page with all of them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.plan import MAIN, VARIANTS
from mpidist.bench.cases import BARE
from mpidist.bench.machine import describe_stream
from mpidist.bench.results import Row, bound_percent, microseconds
from mpidist.measure import round_size

K, M = 1 << 10, 1 << 20
ANY = 1 << 62  # no upper limit of sizes
MEAN_FROM, MEAN_TO = 64 * K, 64 * M


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
    """Figures of one cell: medians over the launches.

    Attributes
    ----------
    times_us : list of float
        Time in each launch.
    ratio, native_ratio : float or None
        Time of the bare call, and of mpidist's native, in the same launch divided by this time.
    percent : float or None
        Share of the 2pS bound.
    wrong : int
        Number of launches with a wrong result.
    """

    times_us: list[float]
    ratio: float | None
    native_ratio: float | None
    percent: float | None
    wrong: int = 0

    @property
    def time_us(self) -> float:
        """Median of the times."""
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
            (row.work, row.in_place, row.bytes, row.candidate): row.time_us
            for row in rows
            if row.memory == "private"
        }
        for row in rows:
            where = row.work, row.in_place, row.bytes or 0
            key = Key(*where, row.candidate, row.memory, variant)
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


def best_bare(cells: Cells, key: Key) -> tuple[str, float] | None:
    """Return the variant under which the bare call was fastest, and its time."""
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
    """A goal over the sizes from `low` to `high`.

    Attributes
    ----------
    measure : {"least", "mean", "percent", "least native"}
        The least ratio to the bare call, its geometric mean, the least share of the bound, or the
        least ratio to mpidist's native.
    goals : mapping of int to float
        The least value, by number of ranks.
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
    """The `value` reached for a goal; for a least value also its size in bytes, `at`."""

    target: Target
    goal: float
    value: float
    at: int | None

    @property
    def met(self) -> bool:
        """Whether the goal was reached."""
        return self.value >= self.goal


def _all_targets() -> list[Target]:
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


WRITTEN = ".. Written by benchmarks/compare.py; do not edit."
PLACES = (
    ("allreduce", True),
    ("allreduce", False),
    ("reduce", False),
    ("reduce_scatter", False),
    ("allgather", False),
    ("broadcast", True),
    ("alltoall", False),
)
"""The measured collectives, and whether in place: broadcast always is."""

TARGETS = _all_targets()


def judge(cells: Cells, ranks: int, targets: Sequence[Target] = tuple(TARGETS)) -> list[Verdict]:
    """Return the verdict on each target of a number of ranks that has a measured cell."""
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
        return Verdict(target, goal, statistics.geometric_mean(list(values.values())), None)
    at = min(values, key=lambda nbytes: values[nbytes])
    return Verdict(target, goal, values[at], at)


@dataclass
class Group:
    """All launches of one MPI and number of ranks."""

    mpi: str
    ranks: int
    cells: Cells
    headers: list[dict[str, Any]]
    commands: list[str]
    commits: list[str]
    launches: dict[str, int]
    failures: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Vendor and version of the MPI library, and the number of ranks."""
        library = self.headers[0].get("mpi") or {} if self.headers else {}
        name = " ".join(filter(None, (library.get("vendor"), library.get("version"))))
        return f"{name or self.mpi}, {self.ranks} ranks"


def page(groups: Sequence[Group], wanted: int) -> str:
    """Return the text that docs/benchmarks.rst includes: every figure."""
    lines = [WRITTEN]
    for group in groups:
        lines += ["", *_group(group, wanted)]
    return "\n".join(lines) + "\n"


def csv(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in reStructuredText."""
    quoted = [", ".join(f'"{cell}"' for cell in row) for row in rows]
    names = ", ".join(f'"{name}"' for name in header)
    return [".. csv-table::", f"   :header: {names}", "", *(f"   {line}" for line in quoted), ""]


def goals(groups: Sequence[Group]) -> str:
    """Return the targets and the values reached, for developers of mpidist."""
    judged = [{v.target: v for v in judge(group.cells, group.ranks)} for group in groups]
    targets = list(dict.fromkeys(target for verdicts in judged for target in verdicts))
    everything = [verdict for verdicts in judged for verdict in verdicts.values()]
    met = sum(verdict.met for verdict in everything)
    rows = [(*_target(t), *(_reached(verdicts.get(t)) for verdicts in judged)) for t in targets]
    header = ("candidate", "sizes", "measure", *(group.title for group in groups))
    summary = f"Goals, and the values reached: {met} of {len(everything)} goals are met."
    return "\n".join([WRITTEN, "", summary, "", *csv(header, rows)])


def _target(target: Target) -> tuple[str, ...]:
    words = [target.collective, *(["in place"] if target.in_place else []), target.algorithm]
    if target.algorithm == "auto":
        words.append(f"{target.memory} arrays")
    if target.low <= 1:
        sizes = f"below {round_size(target.high + 1)}"
    elif target.high == ANY:
        sizes = f"from {round_size(target.low)}"
    else:
        sizes = f"{round_size(target.low)} to {round_size(target.high)}"
    names = {
        "least": "least, × mpi4py",
        "mean": "geometric mean, × mpi4py",
        "percent": "least % of the bound",
        "least native": "least, × native",
    }
    return " ".join(words), sizes, names[target.measure]


def _reached(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not measured"
    value = f"{verdict.value:.{0 if verdict.target.measure == 'percent' else 2}f}"
    place = f" at {round_size(verdict.at)}" if verdict.at is not None else ""
    return f"{value}{place}, goal {verdict.goal:g}: {'met' if verdict.met else '**not met**'}"


def _group(group: Group, wanted: int) -> list[str]:
    lines = [f"**{group.title}**", ""]
    lines += [f"{text}\n" for text in _conditions(group, wanted)]
    for collective, in_place in PLACES:
        keys = sorted(
            (k for k in group.cells if (k.collective, k.in_place) == (collective, in_place)),
            key=lambda key: key.bytes,
        )
        sizes = list(dict.fromkeys(key.bytes for key in keys))
        if sizes:
            place = " in place" if in_place and collective != "broadcast" else ""
            lines += [f"{group.title}: {collective}{place}, float32", ""]
            lines += _figures(group.cells, collective, in_place, sizes)
    return lines


_COLUMNS = (("native", "private"), ("auto", "private"), ("auto", "symmetric"))


def _figures(cells: Cells, collective: str, in_place: bool, sizes: Sequence[int]) -> list[str]:
    header = ["bytes", "mpi4py µs", "native", "auto, private arrays", "auto, symmetric arrays"]
    header += ["symmetric", "mpi4py at its best µs", "its setting", "symmetric × that"]
    bound = collective == "allreduce"
    columns: list[list[float | None]] = []
    rows = []
    for nbytes in sizes:
        where = collective, in_place, nbytes
        own = cells.get(Key(*where, "symmetric", "symmetric"))
        ratios = [_ratio(cells.get(Key(*where, *column))) for column in _COLUMNS]
        ratios.append(_ratio(own))
        best = best_bare(cells, Key(*where, BARE))
        against = best[1] / own.time_us if best and own and nbytes >= MEAN_FROM else None
        bare = cells.get(Key(*where, BARE))
        row = [round_size(nbytes), "" if bare is None else microseconds(bare.time_us)]
        row += [_number(value) for value in ratios]
        row += ["", "", ""] if against is None else [microseconds(best[1]), best[0]]
        row += [] if against is None else [_number(against)]
        if bound:
            share = own.percent if own else None
            row.append("" if share is None else f"{share:.0f}")
        rows.append(row)
        if MEAN_FROM <= nbytes <= MEAN_TO:
            columns.append([*ratios, against])
    if columns:
        means = [_mean(column) for column in zip(*columns)]
        row = ["**mean from 64K**", "", *means[:-1], "", "", means[-1]]
        rows.append(row + [""] * bound)
    return csv([*header, *(["% of bound"] if bound else [])], rows)


def without_paths(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables of an environment, with paths of this machine removed."""
    return {k: v if os.sep not in v else "(a path)" for k, v in environment.items()}


def _ratio(cell: Any) -> float | None:
    return None if cell is None else cell.ratio


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"**{statistics.geometric_mean(known):.2f}**" if known else ""


def _conditions(group: Group, wanted: int) -> list[str]:
    """Return paragraphs: number of launches, versions, machine, commands, settings, failures."""
    counts = ", ".join(f"{name}: {count}" for name, count in group.launches.items())
    text = [f"Launches ({wanted} planned; fewer of the variants of the bare call): {counts}."]
    if group.headers:
        head = group.headers[0]
        versions = ", ".join(f"{k} {v}" for k, v in head.get("versions", {}).items())
        knobs = without_paths(head.get("environment", {}))
        settings = " ".join(f"``{k}={v}``" for k, v in knobs.items())
        dates = sorted(header.get("date", "") for header in group.headers)
        text.append(
            f"{versions}; {head.get('cores')} cores; {dates[0]} to {dates[-1]}; mpidist at "
            f"{', '.join(group.commits)}; set: {settings or 'nothing'}."
        )
        streams = sorted(
            (h for h in group.headers if h.get("stream")), key=lambda h: h["stream"]["gbs"]
        )
        if streams:
            middle = describe_stream(streams[len(streams) // 2])
            rates = ", ".join(f"{h['stream']['gbs']:.1f}" for h in streams)
            text.append(f"{middle[0].upper()}{middle[1:]}; all launches: {rates} GB/s.")
    text += [f"``{command}``" for command in group.commands]
    variants = [
        f"{v.name}: " + " ".join(f"``{k}={value}``" for k, value in v.settings.items())
        for v in VARIANTS
        if any(name.rpartition(", ")[0] == v.name for name in group.launches)
    ]
    if variants:
        text.append(f"Variants of the bare call, measured alone: {'; '.join(variants)}.")
    wrong = [key for key, cell in group.cells.items() if cell.wrong]
    text += [f"WRONG RESULT: {key}" for key in wrong]
    text += [f"FAILED: {failure}" for failure in group.failures]
    return text
