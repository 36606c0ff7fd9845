"""Results of all benchmarks: one type of row, one JSON form, and the tables of them."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal

from ..errors import InvalidArgument
from ..foreign import all_shown, read_json, typed
from ..measure import counted, numbers_of, round_size, significant
from ..schedule.notebook import html_table
from ..selection.tuning import PRIVATE, SYMMETRIC
from ..tables import Column, Line, Table
from .cases import BARE

VERSION = 2  # of the JSON form


@dataclass
class Row:
    """The measurement of one candidate at one piece of work, such as a collective of one size."""

    work: str  # collective, or a description of other work, such as a training step
    candidate: str  # algorithm, path or library
    ranks: int
    time_us: float  # median over the iterations of the slowest rank's time, in microseconds
    # Time of the run's reference candidate divided by this time: above 1 is faster.
    ratio: float | None = None
    correct: bool | None = None  # every call on every rank; None if not checked
    bytes: int | None = None  # of the whole buffer of a collective
    dtype: str | None = None
    op: str | None = None
    backend: str | None = None
    in_place: bool = False  # the result was written over the input
    memory: str = PRIVATE  # of the arrays: "private", or "symmetric" (from comm.empty)
    algbw_gbs: float | None = None  # 10⁹ bytes a second, as in nccl-tests
    busbw_gbs: float | None = None
    # Half the interquartile range of the iterations' times, divided by their median.
    spread: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)  # further ones, by name

    @property
    def label(self) -> str:
        """The candidate's name, with its kind of memory if not private, unless that is its name."""
        if self.memory == PRIVATE or self.candidate == self.memory:
            return self.candidate
        return f"{self.candidate} in {self.memory}"

    def to_json(self) -> dict[str, Any]:
        """Return the row as a dict for JSON, without fields that are None or an empty dict."""
        content = dataclasses.asdict(self)
        return {name: value for name, value in content.items() if value not in (None, {})}


@dataclass
class Refusal:
    """A candidate that was not measured at some work and bytes, and the reason."""

    work: str
    candidate: str
    bytes: int | None  # of the whole buffer of a collective; None for other work
    reason: str
    memory: str = PRIVATE


@dataclass
class Results:
    """All results of one run."""

    # Description of the run: versions, machine, command, environment.
    header: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    unsupported: list[Refusal] = field(default_factory=list)  # candidates that were not measured
    benchmark: str = "collectives"
    reference: str = BARE  # candidate to whose time the ratios refer
    notes: list[str] = field(default_factory=list)  # lines below the tables
    # Timed ones, by collective and bytes ("allreduce 1024"); in the JSON only if the header has it.
    iterations: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def correct(self) -> bool:
        """Whether no row has a wrong result; results that were not checked count as correct."""
        return all(row.correct is not False for row in self.rows)

    @property
    def identical(self) -> dict[str, bool]:
        """By candidate, whether all ranks always had the same bits; without those not checked."""
        found: dict[str, bool] = {}
        for row in self.rows:
            same = row.figures.get("same_bits")
            if same is not None:
                found[row.candidate] = found.get(row.candidate, True) and same
        return found

    def to_json(self) -> str:
        """Return the results as the text of a JSON object."""
        content = {
            "version": VERSION,
            "benchmark": self.benchmark,
            "reference": self.reference,
            "header": self.header,
            "rows": [row.to_json() for row in self.rows],
            "unsupported": [dataclasses.asdict(refusal) for refusal in self.unsupported],
            "notes": self.notes,
        }
        return json.dumps(content, indent=1)

    def _repr_html_(self) -> str:
        parts = []
        for table in tables(self):
            heads = [head.replace("\n", " ") for head in table.heads]
            parts.append(f"<b>{escape(table.heading)}</b>" if table.heading else "")
            parts.append(html_table([line.cells for line in table.lines], heads))
        return "\n".join([*parts, *(f"<p>{escape(note)}</p>" for note in self.notes)])

    def to_csv(self) -> str:
        """Return the rows as CSV, names first; each entry of `figures` has a column of its own."""
        rows = [row.to_json() | row.figures for row in self.rows]
        heads = dict.fromkeys(name for row in rows for name in row if name != "figures")
        text = io.StringIO()
        writer = csv.DictWriter(text, list(heads), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def save(self, path: str) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, text: str) -> Results:
        r"""Return the results in a text of :meth:`to_json`.

        Control characters of its texts become escapes, such as ``\x1b``.  The error names the first
        wrong field, or the version if it is another one.
        """
        try:
            content = all_shown(read_json(text, "it", dict[str, Any], TypeError))
            if content.get("version", VERSION) != VERSION:
                raise InvalidArgument(
                    f"result file of version {content['version']!r:.60}: expected {VERSION}"
                )
            return _checked(typed(content, _Document))
        except TypeError as error:
            raise InvalidArgument(f"not a result file of `mpidist bench`: {error}") from None


@dataclass
class _Document:
    """The JSON of a result file."""

    version: Literal[2]
    benchmark: str
    reference: str
    header: dict[str, Any]
    rows: list[Row]
    unsupported: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Stream:
    """The fields of :class:`~mpidist.bench.machine.StreamBandwidth`."""

    gbs: float
    array_bytes: int
    cache_bytes: int
    enough: bool


# What is computed with of the figures and headers of files; other entries are only shown.
_NUMBERS = (
    *("deadline_s", "least_us", "more_us", "share", "hidden", "of_copies"),
    *("regret", "raw", "floor", "auto", "predicted_us", "error"),
    *("used_us", "used_ratio", "line_ns", "line_most_ns"),
)
_TRUTHS = dict.fromkeys(("same_bits", "changed"), bool | None)
_FIGURES: dict[str, Any] = {**dict.fromkeys(_NUMBERS, float | None), **_TRUTHS}
_HEADER = {
    "busy": list[tuple[str, int, float]],
    "line_ns": dict[str, float | None],
    "nodes": dict[str, int],
    "ranks": int,
    "stream": _Stream | None,
    "mpi": dict[str, Any] | None,
}
_LARGEST = 1e15  # of a row's times, ratios and bandwidths; the smallest is its inverse, or 0


def _checked(found: _Document) -> Results:
    """Return the results of a file's content; TypeError names the first wrong field."""
    for number, row in enumerate(found.rows):
        path = f"rows[{number}]"
        for name, value in numbers_of(row).items():
            least = {"time_us": 1 / _LARGEST, "ranks": 1}.get(name, 0)
            tiny = 0 < value < 1 / _LARGEST
            if value < least or tiny or (value > _LARGEST and name not in ("bytes", "ranks")):
                raise TypeError(f"{path}.{name} is {value}: expected {least:g} to {_LARGEST:g}")
        for name in _FIGURES.keys() & row.figures:
            typed(row.figures[name], _FIGURES[name], f"{path}.figures.{name}")
    for number, refusal in enumerate(found.unsupported):
        if (refusal.bytes or 0) < 0:
            raise TypeError(f"unsupported[{number}].bytes is {refusal.bytes}: expected >= 0")
    for name in _HEADER.keys() & found.header:
        typed(found.header[name], _HEADER[name], f"header.{name}")
    header = found.header
    if any(name not in header["mpi"] for name in ("vendor", "version") if header.get("mpi")):
        raise TypeError("header.mpi: expected vendor and version")
    if header.get("stream") and header["stream"]["gbs"] < 1 / _LARGEST:
        raise TypeError(f"header.stream.gbs is {header['stream']['gbs']}: expected > 0")
    nodes = header.get("nodes", {})
    if found.benchmark == "scaling" and not nodes:
        raise TypeError("header.nodes is missing")
    if not all(re.fullmatch("[0-9]{1,18}", ranks) for ranks in nodes):
        raise TypeError("header.nodes: expected numbers of nodes by numbers of ranks")
    return Results(
        header, found.rows, found.unsupported, found.benchmark, found.reference, found.notes
    )


# -- the bound of an allreduce -------------------------------------------------------------------


def bound_us(nbytes: int, ranks: int, gbs: float) -> float:
    """Return the least time of an allreduce, in µs: that of 2·p·S bytes at `gbs` GB/s.

    An allreduce of S bytes on p ranks reads p inputs and writes p results, if every rank needs a
    copy of its own.
    """
    return 2 * ranks * nbytes / gbs / 1e3


def bound_percent(row: Row, header: Mapping[str, Any]) -> float | None:
    """Return the least time by memory bandwidth over the time of a symmetric allreduce, in percent.

    See :func:`bound_us`.  None for other rows, and if the memory bandwidth was not
    measured.  Above 100 is possible if the data stay in the cache.
    """
    stream = header.get("stream")
    if not stream or row.work != "allreduce" or row.memory != SYMMETRIC or not row.bytes:
        return None
    return 100 * bound_us(row.bytes, row.ranks, stream["gbs"]) / row.time_us


BOUND_NOTE = (
    "% of bound: time to move 2·p·S bytes (p ranks, S bytes) at the memory bandwidth, "
    "divided by the measured time"
)

USED_NOTE = (
    "used: what a program sees, the writing of the input, the call, and the first reading of the "
    "result, together; time, algbw and busbw are of the call alone, as in nccl-tests"
)
CHANGED_NOTE = (
    "*: the round trip of a cache line between ranks 0 and 1 changed by more than a factor of 1.6 "
    "within this row: it has times of two machines"
)

# -- tables --------------------------------------------------------------------------------------


def microseconds(time_us: float) -> str:
    """Return a time in microseconds as text with four significant digits."""
    return significant(time_us, 4)


def times(ratio: float | None) -> str:
    """Return a ratio as text with two decimals; an empty text for None."""
    return "" if ratio is None else f"{ratio:.2f}"


def percent(share: float | None) -> str:
    """Return `share`, in percent, as the text of a whole number; an empty text for None."""
    return "" if share is None else f"{share:.0f}"


def _bandwidth(gbs: float | None) -> str:
    return significant(gbs, 3) if gbs else ""  # a barrier has none


Text = Callable[[Row], str]


def _figure(name: str, form: Callable[[Any], str]) -> Text:
    def text(row: Row) -> str:
        value = row.figures.get(name)
        return "" if value is None else form(value)

    return text


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def columns(results: Results) -> dict[Column, Text]:
    """Return all possible columns, each with a function that returns the text of a row in it.

    The text is empty if the row does not have the value.  A table shows the columns that have text
    in one of its rows.
    """
    shows_memory = any(row.memory != PRIVATE for row in results.rows)
    header, reference = results.header, results.reference
    return {
        Column("work"): lambda row: "" if row.bytes is not None else row.work,
        Column.numbers("bytes"): lambda row: "" if row.bytes is None else round_size(row.bytes),
        Column.names("candidate"): lambda row: row.candidate,
        Column.names("memory"): lambda row: row.memory if shows_memory else "",
        Column.numbers("deadline\ns"): _figure("deadline_s", lambda s: f"{s:g}" if s else "none"),
        Column.numbers("microbatches"): _figure("microbatches", str),
        Column.numbers("time\nµs"): lambda row: microseconds(row.time_us),
        Column.numbers("predicted\nµs"): _figure("predicted_us", microseconds),
        Column.numbers("error\n%"): _figure("error", lambda share: f"{100 * share:+.0f}"),
        Column.numbers("least\nµs"): _figure("least_us", microseconds),
        Column(): _figure("changed", lambda changed: "*" * changed),
        Column.numbers("± %", narrow=False): lambda row: (
            "" if row.spread is None else f"{100 * row.spread:.0f}"
        ),
        Column.numbers("more than\nbare µs"): _figure("more_us", lambda us: f"{us:.2f}"),
        Column.numbers("algbw\nGB/s", narrow=False): lambda row: _bandwidth(row.algbw_gbs),
        Column.numbers("busbw\nGB/s"): lambda row: _bandwidth(row.busbw_gbs),
        Column.numbers(f"x\n{reference}"): lambda row: times(row.ratio),
        Column.numbers("used\nµs", narrow=False): _figure("used_us", microseconds),
        Column.numbers(f"used x\n{reference}", narrow=False): _figure("used_ratio", times),
        Column.numbers("time /\nnone"): _figure("share", lambda share: f"{share:.2f}"),
        Column.numbers("hidden\n%"): _figure("hidden", lambda share: f"{100 * share:.0f}"),
        Column.numbers("% of\ncopies"): _figure("of_copies", lambda share: f"{100 * share:.0f}"),
        Column.numbers("% of\nbound"): lambda row: percent(bound_percent(row, header)),
        Column("correct"): lambda row: {True: "yes", False: "WRONG", None: ""}[row.correct],
        Column("same\nbits"): _figure("same_bits", _yes),
    }


def tables(results: Results) -> list[Table]:
    """Return the tables of a run: one for each collective, and one of all work without a size.

    A table of the candidates that were not measured follows where there are some.
    """
    if results.benchmark == "scaling":
        return _scaling_tables(results)
    made = []
    works = [row.work if row.bytes is not None else "" for row in results.rows]
    refused = [one.work if one.bytes is not None else "" for one in results.unsupported]
    for work in dict.fromkeys([*works, *refused]):
        rows = [row for row, name in zip(results.rows, works) if name == work]
        if rows:
            made.append(_table(_heading(rows[0]) if work else "", rows, columns(results)))
        missing = [one for one, name in zip(results.unsupported, refused) if name == work]
        if missing:
            made.append(_refusals(missing))
    return made


def _refusals(missing: Sequence[Refusal]) -> Table:
    every: dict[Column, Callable[[Refusal], str]] = {
        Column("work"): lambda one: one.work if one.bytes is None else "",
        Column.names("not measured"): lambda one: one.candidate,
        Column.names("memory"): lambda one: "" if one.bytes is None else one.memory,
        Column.numbers("bytes"): lambda one: "" if one.bytes is None else round_size(one.bytes),
        Column("reason"): lambda one: one.reason,
    }
    shown = {column: text for column, text in every.items() if any(map(text, missing))}
    lines = [Line([text(one) for text in shown.values()]) for one in missing]
    return Table("", list(shown), lines)


def _heading(row: Row) -> str:
    words = [row.work, counted(row.ranks, "rank")]
    if row.work != "barrier":
        words += [*filter(None, (row.dtype, row.op)), *(["in place"] * row.in_place)]
    return ", ".join(words)


def _table(heading: str, rows: Sequence[Row], every: Mapping[Column, Text]) -> Table:
    shown = {column: text for column, text in every.items() if any(map(text, rows))}
    widest = max((row.busbw_gbs or 0.0 for row in rows), default=0.0)
    lines = []
    for _, group in groupby(rows, lambda row: (row.work, row.bytes)):
        equals = list(group)
        fastest = leader(equals)
        for row in equals:
            line = Line([text(row) for text in shown.values()])
            line.starts_group = row is equals[0]
            line.style = _style(row, fastest) if row.bytes is not None else ""
            line.bar = (row.busbw_gbs or 0.0) / widest if widest else None
            lines.append(line)
    return Table(heading, list(shown), lines)


def leader(rows: Sequence[Row]) -> Row | None:
    """Return the fastest row; None if its lead is not larger than the spread of the first two."""
    fastest, *others = sorted(rows, key=lambda row: row.time_us)
    if others:
        lead = others[0].time_us / fastest.time_us - 1 if fastest.time_us else 0.0
        if lead <= max(fastest.spread or 0.0, others[0].spread or 0.0):
            return None
    return fastest


def _style(row: Row, fastest: Row | None) -> str:
    if row.correct is False:
        return "wrong"
    if row is fastest:
        return "fastest"
    return "baseline" if row.candidate in (BARE, "native") else ""


def _scaling_tables(results: Results) -> list[Table]:
    """Return a table for each collective: lines are sizes and candidates, columns node counts."""
    nodes, made = results.header["nodes"], []
    for work in dict.fromkeys(row.work for row in results.rows):
        counts = [Column.numbers(f"{counted(count, 'node')}\nµs") for count in nodes.values()]
        lines = []
        rows = [row for row in results.rows if row.work == work]
        for name in dict.fromkeys(row.label for row in rows):
            # Bytes are rounded up to multiples of the ranks, so sizes are matched by their order.
            each = [
                sorted(
                    (row for row in rows if row.ranks == int(ranks) and row.label == name),
                    key=lambda row: row.bytes or 0,
                )
                for ranks in nodes
            ]
            for cells in zip_longest(*each):
                nbytes = next(row.bytes for row in cells if row is not None)
                lines.append(Line([round_size(nbytes or 0), name, *map(_scaling_cell, cells)]))
        made.append(
            Table(work, [Column.numbers("bytes"), Column.names("candidate"), *counts], lines)
        )
    return made


def _scaling_cell(row: Row | None) -> str:
    if row is None:
        return ""
    marks = " *" * bool(row.figures.get("changed")) + " WRONG" * (row.correct is False)
    return microseconds(row.time_us) + marks
