"""The comparison as reStructuredText."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.merge import (
    ANY,
    BARE,
    PLACES,
    Cells,
    Key,
    Target,
    Verdict,
    best_bare,
    geometric_mean,
    judge,
)
from benchmarks.plan import VARIANTS
from mpidist.bench.memory import describe_stream
from mpidist.bench.results import microseconds
from mpidist.measure import round_size

MEAN_FROM, MEAN_TO = 64 << 10, 64 << 20


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
        """Vendor, version and ranks."""
        library = self.headers[0].get("mpi") or {} if self.headers else {}
        name = " ".join(filter(None, (library.get("vendor"), library.get("version"))))
        return f"{name or self.mpi}, {self.ranks} ranks"


def page(groups: Sequence[Group], wanted: int) -> str:
    """Give what docs/benchmarks.rst includes: targets first, then every figure."""
    lines = [".. Written by benchmarks/compare.py; do not edit.", ""]
    lines += _targets(groups)
    for group in groups:
        lines += ["", *_group(group, wanted)]
    return "\n".join(lines) + "\n"


def _csv(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    quoted = [", ".join(f'"{cell}"' for cell in row) for row in rows]
    names = ", ".join(f'"{name}"' for name in header)
    return [".. csv-table::", f"   :header: {names}", "", *(f"   {line}" for line in quoted), ""]


def _targets(groups: Sequence[Group]) -> list[str]:
    judged = [{v.target: v for v in judge(group.cells, group.ranks)} for group in groups]
    targets = list(dict.fromkeys(target for verdicts in judged for target in verdicts))
    everything = [verdict for verdicts in judged for verdict in verdicts.values()]
    met = sum(verdict.met for verdict in everything)
    rows = [(*_target(t), *(_reached(verdicts.get(t)) for verdicts in judged)) for t in targets]
    header = ("what", "sizes", "measure", *(group.title for group in groups))
    said = f"What was to be reached, and what was: {met} of {len(everything)} goals are met."
    return [said, "", *_csv(header, rows)]


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
    lines += [f"{text}\n" for text in _said(group, wanted)]
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


_WAYS = (("native", "private"), ("auto", "private"), ("auto", "symmetric"))


def _figures(cells: Cells, collective: str, in_place: bool, sizes: Sequence[int]) -> list[str]:
    header = ["bytes", "mpi4py µs", "native", "auto, private arrays", "auto, symmetric arrays"]
    header += ["symmetric", "mpi4py at its best µs", "set for it", "symmetric × that"]
    bound = collective == "allreduce"
    columns: list[list[float | None]] = []
    rows = []
    for nbytes in sizes:
        where = collective, in_place, nbytes
        own = cells.get(Key(*where, "symmetric", "symmetric"))
        ratios = [_ratio(cells.get(Key(*where, *way))) for way in _WAYS]
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
    return _csv([*header, *(["% of bound"] if bound else [])], rows)


def without_paths(environment: dict[str, str]) -> dict[str, str]:
    """Give the variables of an environment, without what only this machine has: paths."""
    return {k: v if os.sep not in v else "(a path)" for k, v in environment.items()}


def _ratio(cell: Any) -> float | None:
    return None if cell is None else cell.ratio


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"**{geometric_mean(known):.2f}**" if known else ""


def _said(group: Group, wanted: int) -> list[str]:
    """Say on what it was measured, how often, and what failed."""
    counts = ", ".join(f"{name}: {count}" for name, count in group.launches.items())
    said = [f"Launches ({wanted} wanted; of native's variants fewer): {counts}."]
    if group.headers:
        head = group.headers[0]
        versions = ", ".join(f"{k} {v}" for k, v in head.get("versions", {}).items())
        knobs = without_paths(head.get("environment", {}))
        told = " ".join(f"``{k}={v}``" for k, v in knobs.items())
        dates = sorted(header.get("date", "") for header in group.headers)
        said.append(
            f"{versions}; {head.get('cores')} cores; {dates[0]} to {dates[-1]}; mpidist at "
            f"{', '.join(group.commits)}; set: {told or 'nothing'}."
        )
        streams = sorted(
            (h for h in group.headers if h.get("stream")), key=lambda h: h["stream"]["gbs"]
        )
        if streams:
            middle = describe_stream(streams[len(streams) // 2])
            rates = ", ".join(f"{h['stream']['gbs']:.1f}" for h in streams)
            said.append(f"{middle[0].upper()}{middle[1:]}; all launches: {rates} GB/s.")
    said += [f"``{command}``" for command in group.commands]
    settings = [
        f"{v.name}: " + " ".join(f"``{k}={value}``" for k, value in v.settings.items())
        for v in VARIANTS
        if any(name.rpartition(", ")[0] == v.name for name in group.launches)
    ]
    if settings:
        said.append(f"The bare call alone, with settings of its own: {'; '.join(settings)}.")
    wrong = [key for key, cell in group.cells.items() if cell.wrong]
    said += [f"WRONG RESULT: {key}" for key in wrong]
    said += [f"FAILED: {failure}" for failure in group.failures]
    return said
