"""The comparison of two runs of ``mpidist bench``, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..errors import InvalidArgument
from ..foreign import read_file, shown
from ..measure import round_size
from ..tables import Column, Line, Table
from .results import Results, Row, microseconds

NOISE = 0.10  # medians of two launches differ by so much on a quiet machine
_LONGEST = 64 << 20  # bytes of a file
_IGNORED = (
    "date",
    "command",
    "iterations",
    "busy",
    "line_ns",
)  # entries of headers that differ in any two runs


def read(path: str) -> Results:
    """Read the results of a run; InvalidArgument if it is not a file of ``mpidist bench``."""
    try:
        return Results.from_json(read_file(path, longest=_LONGEST).decode())
    except (OSError, UnicodeDecodeError, InvalidArgument) as error:
        why = getattr(error, "strerror", None) or error
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else why
        raise InvalidArgument(f"{shown(path)}: {why}") from None


@dataclass(frozen=True)
class Pair:
    """The rows of the same candidate and work in the two runs."""

    first: Row
    second: Row
    noise: float  # difference of the two times, as a fraction, up to which it counts as chance

    @property
    def ratio(self) -> float:
        """Time of the first run divided by the second's: above 1 the second is faster."""
        return self.first.time_us / self.second.time_us

    @property
    def verdict(self) -> str:
        """Text such as "better" or "worse, now WRONG"; empty for a difference within the noise."""
        before, now = self.first.correct is not False, self.second.correct is not False
        if before != now:
            return "better, now correct" if now else "worse, now WRONG"
        if not now:
            return "WRONG in both"
        if self.ratio > 1 + self.noise:
            return "better"
        return "worse" if self.ratio < 1 / (1 + self.noise) else ""


@dataclass(frozen=True)
class Comparison:
    """Two runs: pairs of rows, rows of one run only, differences of the headers."""

    pairs: list[Pair]
    only_first: list[Row]
    only_second: list[Row]
    headers: list[tuple[str, str, str]]  # entry that differs, and its value in each run
    # Candidate to whose time the ratios within each run refer, as named by the first run.
    reference: str


def compare(first: Results, second: Results, noise: float = NOISE) -> Comparison:
    """Pair the rows of two runs that measured the same.

    The rows of a pair agree in work, bytes, candidate, memory, dtype, op, deadline and in being in
    place, in ``bench scaling`` also in the number of ranks.  The noise of a pair is the largest of
    `noise` and the spreads of its two rows (fractions of a time).
    """
    left, right = _rows_by_key(first), _rows_by_key(second)
    pairs = [
        Pair(row, right[key], max(noise, row.spread or 0.0, right[key].spread or 0.0))
        for key, row in left.items()
        if key in right
    ]
    return Comparison(
        pairs,
        [row for key, row in left.items() if key not in right],
        [row for key, row in right.items() if key not in left],
        list(_differences(_described(first), _described(second))),
        first.reference,
    )


def _rows_by_key(results: Results) -> dict[tuple, Row]:
    """Return the rows of a run by key; rows of two runs that measured the same have equal keys.

    The number of ranks is part of the key only in ``bench scaling``, where one run has several.
    """
    several = results.benchmark == "scaling"
    return {
        (
            *(row.work, row.bytes, row.candidate, row.memory, row.in_place, row.dtype, row.op),
            *(row.ranks if several else None, row.figures.get("deadline_s")),
        ): row
        for row in results.rows
    }


def _described(results: Results) -> dict[str, Any]:
    return {"benchmark": results.benchmark, **results.header}


def _differences(first: Any, second: Any, name: str = "") -> Iterable[tuple[str, str, str]]:
    """Yield each difference between two headers: its name, and both values as text.

    The name of a value in nested dicts is the keys on the way to it, with blanks between them.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            if name or key not in _IGNORED:
                yield from _differences(first.get(key), second.get(key), f"{name} {key}".strip())
    elif first != second:
        yield name, _text(first), _text(second)


def _text(value: Any) -> str:
    return "not there" if value is None else str(value)


def tables(comparison: Comparison, narrow: bool = False) -> Iterable[Table]:
    """Yield tables of the headers' differences, the pairs, and the rows of one run only.

    With `narrow`, the collective, the memory and whether in place are in headings (a table for
    each) and not in columns.
    """
    if comparison.headers:
        lines = [Line(list(names)) for names in comparison.headers]
        columns = list(map(Column, ("header", "first", "second")))
        yield Table("differences between the runs", columns, lines)
    if narrow:
        for (work, memory, place), group in groupby(comparison.pairs, _common):
            heading = f"{work}, {memory} memory, {place}: first run and second run"
            yield _pairs(heading, list(group), _SHORT, comparison.reference)
    elif comparison.pairs:
        yield _pairs("first run and second run", comparison.pairs, _NAMES, comparison.reference)
    for which, rows in (("first", comparison.only_first), ("second", comparison.only_second)):
        if rows:
            lines = [Line([*_name(row, _NAMES), microseconds(row.time_us)]) for row in rows]
            yield Table(
                f"only in the {which} run", [*_NAMES.values(), Column.numbers("time\nµs")], lines
            )


_NAMES = {
    "work": Column.names("work"),
    "bytes": Column.numbers("bytes"),
    "candidate": Column.names("candidate"),
    "memory": Column("memory"),
    "place": Column("place"),
}
_SHORT = {name: _NAMES[name] for name in ("bytes", "candidate")}


def _name(row: Row, names: Iterable[str]) -> list[str]:
    nbytes = "" if row.bytes is None else round_size(row.bytes)
    known = {"bytes": nbytes, "place": "in place" if row.in_place else "apart"}
    return [known[name] if name in known else str(getattr(row, name)) for name in names]


def _common(pair: Pair) -> tuple[str, ...]:
    return tuple(_name(pair.first, ("work", "memory", "place")))


def _pairs(heading: str, pairs: Iterable[Pair], names: dict[str, Column], reference: str) -> Table:
    ratios = [f"{run}\nx\n{reference}" for run in ("first", "second")]
    numbers = map(Column.numbers, ("first\nµs", "second\nµs", "ratio", *ratios))
    return Table(
        heading,
        [*names.values(), *numbers, Column.names("second\nis")],
        [
            Line(
                [
                    *_name(pair.first, names),
                    microseconds(pair.first.time_us),
                    microseconds(pair.second.time_us),
                    f"{pair.ratio:.2f}",
                    *(
                        "" if r.ratio is None else f"{r.ratio:.2f}"
                        for r in (pair.first, pair.second)
                    ),
                    pair.verdict,
                ],
                "better" if pair.verdict.startswith("better") else "worse" if pair.verdict else "",
            )
            for pair in pairs
        ],
    )
