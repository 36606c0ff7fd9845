"""Two runs beside each other, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import InvalidArgument
from ..measure import round_size
from .results import MakeTable, Results, Row, microseconds

NOISE = 0.10  # medians of two launches differ by as much on a quiet machine
_IGNORED = ("date", "command", "iterations")  # of a header: they differ between any two runs


def read(path: str) -> Results:
    """Read results from a file.

    Raises
    ------
    InvalidArgument
        If it cannot be read, or holds no results.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}") from None
    try:
        return Results.from_json(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None


@dataclass(frozen=True)
class Pair:
    """The same contender in both runs.

    Attributes
    ----------
    noise : float
        Part of a time by which the two may differ without a meaning.
    """

    first: Row
    second: Row
    noise: float

    @property
    def ratio(self) -> float:
        """Time of the first run over that of the second: above 1 the second is faster."""
        return self.first.time_us / self.second.time_us

    @property
    def verdict(self) -> str:
        """``"better"`` or ``"worse"`` where the second differs beyond noise, or is wrong."""
        if self.first.correct != self.second.correct:
            return "better, now right" if self.second.correct else "worse, now WRONG"
        if not self.second.correct:
            return "WRONG in both"
        if self.ratio > 1 + self.noise:
            return "better"
        return "worse" if self.ratio < 1 / (1 + self.noise) else ""


@dataclass(frozen=True)
class Comparison:
    """Two runs: pairs of rows, rows of one run only, and how their headers differ."""

    pairs: list[Pair]
    only_first: list[Row]
    only_second: list[Row]
    headers: list[tuple[str, str, str]]


def compare(first: Results, second: Results, noise: float = NOISE) -> Comparison:
    """Pair the rows of two runs by collective, bytes, algorithm, memory, dtype, op and place.

    A pair's noise is the largest of `noise` and, where it was recorded, half of the range in which
    the middle half of the iterations of either row lies.
    """
    left = {_key(row): row for row in first.rows}
    right = {_key(row): row for row in second.rows}
    pairs = [
        Pair(row, right[key], max(noise, row.spread or 0.0, right[key].spread or 0.0))
        for key, row in left.items()
        if key in right
    ]
    return Comparison(
        pairs,
        [row for key, row in left.items() if key not in right],
        [row for key, row in right.items() if key not in left],
        list(_differences(first.header, second.header)),
    )


def _key(row: Row) -> tuple:
    place = row.in_place, row.dtype, row.op
    return row.collective, row.bytes, row.algorithm, row.memory, *place


def _differences(first: Any, second: Any, name: str = "") -> Iterable[tuple[str, str, str]]:
    """Give what differs: name, and both values as text; nested names joined by blanks."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            if name or key not in _IGNORED:
                yield from _differences(first.get(key), second.get(key), f"{name} {key}".strip())
    elif first != second:
        yield name, _text(first), _text(second)


def _text(value: Any) -> str:
    return "not there" if value is None else str(value)


def tabulate(
    comparison: Comparison, make: MakeTable, narrow: bool = False
) -> Iterable[tuple[str, Table]]:
    """Give headings and tables: headers, pairs, rows of one run only.

    Where it is `narrow`, what many pairs have in common stands in headings, not in columns.
    """
    if comparison.headers:
        table = make("header", "first", "second")
        for line in comparison.headers:
            table.add_row(*line)
        yield "what the runs differ in", table
    if narrow:
        for (collective, memory, place), group in groupby(comparison.pairs, _common):
            heading = f"{collective}, {memory} memory, {place}: first run and second run"
            yield heading, _pairs(group, make, _SHORT)
    elif comparison.pairs:
        yield "first run and second run", _pairs(comparison.pairs, make, _NAMES)
    for which, rows in (("first", comparison.only_first), ("second", comparison.only_second)):
        if rows:
            table = make(*_NAMES.values(), ">time\nµs")
            for row in rows:
                table.add_row(*_name(row, _NAMES), microseconds(row.time_us))
            yield f"only in the {which} run", table


_NAMES = {
    "collective": "=collective",
    "bytes": ">bytes",
    "algorithm": "=algorithm",
    "memory": "memory",
    "place": "place",
}
_SHORT = {name: _NAMES[name] for name in ("bytes", "algorithm")}


def _name(row: Row, names: Iterable[str]) -> list[str]:
    place = "in place" if row.in_place else "apart"
    known = {"bytes": round_size(row.bytes), "place": place}
    return [known.get(name) or str(getattr(row, name)) for name in names]


def _common(pair: Pair) -> tuple[str, ...]:
    return tuple(_name(pair.first, ("collective", "memory", "place")))


def _pairs(pairs: Iterable[Pair], make: MakeTable, names: dict[str, str]) -> Table:
    numbers = (">first\nµs", ">second\nµs", ">ratio", ">first\nx\nmpi4py", ">second\nx\nmpi4py")
    table = make(*names.values(), *numbers, "=second\nis")
    for pair in pairs:
        verdict = pair.verdict
        style = "green" if verdict.startswith("better") else "red" if verdict else None
        table.add_row(
            *_name(pair.first, names),
            microseconds(pair.first.time_us),
            microseconds(pair.second.time_us),
            f"{pair.ratio:.2f}",
            *("" if v is None else f"{v:.2f}" for v in _native(pair)),
            verdict,
            style=style,
        )
    return table


def _native(pair: Pair) -> tuple[float | None, float | None]:
    return pair.first.vs_native, pair.second.vs_native
