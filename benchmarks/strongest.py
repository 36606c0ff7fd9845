"""The strongest peer at each size, of other MPIs and libraries, in each state of the machine.

A figure is ``used_us`` of ``mpidist bench``: writing the input, the call and the first reading of
the result, together.  Cells are medians over the launches that found the machine in that state.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from benchmarks.plan import PEER_COLLECTIVES
from benchmarks.tables import WRITTEN, csv, without_paths
from mpidist.bench.cases import BARE
from mpidist.bench.machine import CHANGED
from mpidist.bench.results import Row, microseconds
from mpidist.measure import counted, round_size
from mpidist.selection.tuning import MEMORIES

NEAR, FAR, ONE = "near", "far", "one state"
WORKS = tuple((name, name == "broadcast") for name in PEER_COLLECTIVES) + (("allreduce", True),)
Work = tuple[str, bool]
"""A collective, and whether in place."""
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


@dataclass(frozen=True)
class Spot:
    """What is compared: a collective of one size in one state of the machine.

    `contender` is the name of a peer, or a kind of memory of mpidist's arrays over the MPI `mpi`.
    """

    state: str
    collective: str
    in_place: bool
    bytes: int
    contender: str
    mpi: str = ""


@dataclass
class Peers:
    """All launches of the comparison with other libraries.

    Attributes
    ----------
    times : dict
        Microseconds of each launch, by spot.
    mpis, libraries : list of str
        Contenders: MPI libraries with their versions, and others; in the order of the launches.
    states : dict
        Least and largest round trip of a cache line, in nanoseconds, by state.
    mixed : int
        Number of rows that were left out, because the machine changed within them.
    notes : list of str
        Libraries that were left out, and launches that failed.
    """

    times: dict[Spot, list[float]] = field(default_factory=dict)
    mpis: list[str] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)
    states: dict[str, tuple[float, float]] = field(default_factory=dict)
    mixed: int = 0
    wrong: int = 0
    ranks: int = 2
    launches: Counter[str] = field(default_factory=Counter)
    commands: dict[str, None] = field(default_factory=dict)
    commits: dict[str, None] = field(default_factory=dict)
    headers: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        """Names of all peers."""
        return [*self.mpis, *self.libraries]

    def time(self, spot: Spot) -> float | None:
        """Return the median of a spot; for a peer's allreduce, the better of both places."""
        places = (True, False)
        if spot.contender in MEMORIES or spot.collective != "allreduce":
            places = (spot.in_place,)
        found = [
            statistics.median(self.times[one])
            for one in (_at(spot, in_place=place) for place in places)
            if one in self.times
        ]
        return min(found, default=None)

    def strongest(self, state: str, work: Work, nbytes: int) -> tuple[str, float]:
        """Return the fastest peer and its time; an empty name if there is none."""
        found = {}
        for name in self.peers:
            time = self.time(Spot(state, *work, nbytes, name))
            if time is not None:
                found[name] = time
        return min(found.items(), key=lambda item: item[1], default=("", 0.0))

    def ratio(self, state: str, work: Work, nbytes: int, memory: str, mpi: str) -> float | None:
        """Return the strongest peer's time over mpidist's with such arrays over an MPI."""
        name, time = self.strongest(state, work, nbytes)
        own = self.time(Spot(state, *work, nbytes, memory, mpi))
        return None if own is None or not name else time / own

    def sizes(self, state: str) -> list[int]:
        """Return the sizes that have rows of mpidist in a state."""
        own = {s.bytes for s in self.times if s.state == state and s.contender in MEMORIES}
        return sorted(own)

    def ratios(self, state: str, memory: str, mpi: str) -> dict[tuple[Work, int], float]:
        """Return all known ratios, by work and size."""
        return {
            (work, nbytes): value
            for work in WORKS
            for nbytes in self.sizes(state)
            if (value := self.ratio(state, work, nbytes, memory, mpi)) is not None
        }


def _at(spot: Spot, in_place: bool) -> Spot:
    return Spot(spot.state, spot.collective, in_place, spot.bytes, spot.contender, spot.mpi)


def title(header: Mapping[str, Any]) -> str:
    """Return vendor and version of the MPI library of a launch."""
    mpi = header.get("mpi") or {}
    return f"{mpi.get('vendor', 'MPI')} {mpi.get('version', '')}".strip()


def gathered(
    runs: Sequence[tuple[str, Mapping[str, Any], Sequence[Row]]],
    alone: bool = False,
) -> Peers:
    """Return the figures of all launches; with `alone`, the times of the calls alone.

    Parameters
    ----------
    runs : sequence of (library, header, rows)
        One per launch; the library is empty for one of ``mpidist bench``, whose rows are of the
        bare call of its MPI and of mpidist.
    """
    found = Peers()
    border = border_of([row for _, _, rows in runs for row in rows])
    for library, header, rows in runs:
        mpi = title(header)
        mine, name = (found.libraries, library) if library else (found.mpis, mpi)
        if name not in mine:
            mine.append(name)
        found.launches[name] += 1
        found.headers.append(dict(header))
        found.ranks = header.get("ranks", found.ranks)
        for row in rows:
            time = row.time_us if alone else row.figures["used_us"]
            _add(found, row, time, library, mpi, border)
    return found


def border_of(rows: Iterable[Row]) -> float | None:
    """Return the round trip that is between those of near and of far rows; None with one state.

    It is within the largest gap, if that is wider than what marks a row as changed.
    """
    pairs = [_trip(row) for row in rows if not row.figures.get("changed")]
    trips = sorted(value for pair in pairs for value in pair if value)
    gaps = [(high / low, low, high) for low, high in pairwise(trips)]
    widest, low, high = max(gaps, default=(0.0, 0.0, 0.0))
    return statistics.geometric_mean([low, high]) if widest > CHANGED else None


def _trip(row: Row) -> tuple[float, float]:
    return row.figures.get("line_ns") or 0.0, row.figures.get("line_most_ns") or 0.0


def _add(found: Peers, row: Row, time: float, library: str, mpi: str, border: float | None) -> None:
    """Add a row's time to its spot; the bare call beside another library is not counted twice."""
    bare = row.candidate == BARE
    if row.candidate not in ((library,) if library else (BARE, "auto")):
        return
    found.wrong += row.correct is False
    if row.figures.get("changed"):
        found.mixed += 1
        return
    low, high = _trip(row)
    state = ONE if border is None else NEAR if high < border else FAR
    before = found.states.get(state, (low, high))
    found.states[state] = min(low, before[0]), max(high, before[1])
    who = (library,) if library else (mpi,) if bare else (row.memory, mpi)
    spot = Spot(state, row.work, row.in_place, row.bytes or 0, *who)
    found.times.setdefault(spot, []).append(time)


# -- texts -----------------------------------------------------------------------------------------


def named(work: Work) -> str:
    """Return a collective's name, with "in place" where it also has another form."""
    collective, in_place = work
    return collective + " in place" * (in_place and collective != "broadcast")


def shown(ratio: float | None, bold: str = "**") -> str:
    """Return a ratio with two decimals, bold where the strongest peer is faster."""
    if ratio is None:
        return ""
    text = f"{ratio:.2f}"
    return f"{bold}{text}{bold}" if ratio < 1 else text


def mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean, None without any."""
    known = list(ratios)
    return statistics.geometric_mean(known) if known else None


def ordered(found: Peers) -> list[str]:
    """Return the states that have rows of mpidist, near first."""
    return [state for state in (NEAR, FAR, ONE) if found.sizes(state)]


def described(found: Peers, state: str) -> str:
    """Return a state's name with its round trips of a cache line."""
    low, high = found.states[state]
    if not high:
        return "round trip of a cache line not known"
    return f"{state}, round trip of a cache line {low:.0f} to {high:.0f} ns"


def summary(found: Peers, alone: Peers) -> str:
    """Return what docs/benchmarks.rst includes: ratios, and where the strongest is a peer.

    `alone` has the times of the calls alone.
    """
    lines = [WRITTEN, ""]
    for state in ordered(found):
        mpi, sizes = found.mpis[0], found.sizes(state)
        lines += [f"**{described(found, state)}**, mpidist over {mpi}, {found.ranks} ranks:", ""]
        rows = []
        for memory in MEMORIES:
            ratios = found.ratios(state, memory, mpi)
            for work in WORKS:
                cells = [ratios.get((work, n)) for n in sizes]
                known = [value for value in cells if value is not None]
                rows.append([named(work), memory, *map(shown, cells), shown(mean(known))])
            columns = [mean(v for (_, n), v in ratios.items() if n == size) for size in sizes]
            everything = shown(mean(ratios.values()))
            rows.append(["mean", memory, *map(shown, columns), everything])
        lines += csv(["", "arrays", *map(round_size, sizes), "mean"], rows)
    lines += [
        "Geometric means over all collectives and sizes, the cells where a peer is faster, and the "
        "mean for the time of the call alone:",
        "",
        *csv(["mpidist over", "arrays", *ordered(found)], _means(found, alone)),
        *(line for state in ordered(found) for line in [_lost(found, state), ""]),
    ]
    return "\n".join(lines)


def _means(found: Peers, alone: Peers) -> list[list[str]]:
    rows = []
    for mpi in found.mpis:
        for memory in MEMORIES:
            cells = []
            for state in ordered(found):
                ratios = found.ratios(state, memory, mpi).values()
                slower = sum(value < 1 for value in ratios)
                count = f"{slower} of {len(ratios)}"
                call = shown(mean(alone.ratios(state, memory, mpi).values()))
                text = f"{shown(mean(ratios))}; a peer is faster in {count}; calls alone {call}"
                cells.append(text if ratios else "")
            rows.append([mpi, memory, *cells])
    return rows


def _lost(found: Peers, state: str) -> str:
    """Return sentences with the strongest peer at each size, and the cells where it is faster."""
    by_size = []
    for nbytes in found.sizes(state):
        names = Counter(found.strongest(state, work, nbytes)[0] for work in WORKS)
        text = ", ".join(f"{name} {count}" for name, count in names.most_common() if name)
        by_size.append(f"{round_size(nbytes)}: {text}")
    texts = []
    for memory in MEMORIES:
        lost = [cell for cell, v in found.ratios(state, memory, found.mpis[0]).items() if v < 1]
        works = [
            f"{named(work)} {', '.join(round_size(n) for _, n in cells)}"
            for work, cells in groupby(lost, lambda cell: cell[0])
        ]
        texts.append(f"{memory} arrays: {'; '.join(works) or 'nowhere'}.")
    return (
        f"{state.capitalize()}, the strongest peers, by the number of rows: {'; '.join(by_size)}.  "
        f"Where they are faster than mpidist over {found.mpis[0]}, {'  In '.join(texts)}"
    )


def page(found: Peers, wanted: int) -> str:
    """Return what docs/benchmarks-tables.rst includes: every time, and the conditions."""
    counts = ", ".join(f"{name} {count}" for name, count in found.launches.items())
    lines = [
        WRITTEN,
        "",
        f"Launches ({wanted} planned of each, twice that with both places): {counts}.",
    ]
    if found.headers:
        versions: dict[str, str] = {}
        for header in found.headers:
            versions |= header.get("versions", {})
        head = found.headers[0]
        dates = sorted(header.get("date", "") for header in found.headers)
        settings = " ".join(
            f"``{k}={v}``" for k, v in without_paths(head.get("environment", {})).items()
        )
        text = ", ".join(f"{name} {number}" for name, number in versions.items())
        lines += [
            "",
            f"{text}; {head.get('cores')} cores; {dates[0]} to {dates[-1]}; mpidist at "
            f"{', '.join(found.commits)}; set: {settings or 'nothing'}.",
        ]
    if found.mixed:
        rows = counted(found.mixed, "row")
        lines += ["", f"{rows} left out: the machine changed within them."]
    lines += [line for command in found.commands for line in ("", f"``{command}``")]
    lines += [line for note in found.notes for line in ("", note)]
    own = [(memory, mpi) for memory in MEMORIES for mpi in found.mpis]
    head = ["bytes", *found.peers, *(f"mpidist, {memory}, {mpi}" for memory, mpi in own)]
    for state in ordered(found):
        for work in WORKS:
            rows = []
            for nbytes in found.sizes(state):
                best, _ = found.strongest(state, work, nbytes)
                spots = [Spot(state, *work, nbytes, name) for name in found.peers]
                spots += [Spot(state, *work, nbytes, memory, mpi) for memory, mpi in own]
                times = [found.time(spot) for spot in spots]
                texts = ["" if time is None else microseconds(time) for time in times]
                marked = [
                    f"**{t}**" if spot.contender == best else t for spot, t in zip(spots, texts)
                ]
                rows.append([round_size(nbytes), *marked])
            if any(any(row[1:]) for row in rows):
                where = described(found, state)
                lines += ["", f"µs, {where}: {named(work)}, float32, {found.ranks} ranks", ""]
                lines += csv(head, rows)
    return "\n".join(lines) + "\n"


def readme(found: Peers) -> str:
    """Return the table of README.md: means over the collectives at each size."""
    sizes = sorted({n for state in ordered(found) for n in found.sizes(state)})
    lines = [
        "| cores | arrays | " + " | ".join(map(round_size, sizes)) + " |",
        "|" + " --- |" * (len(sizes) + 2),
    ]
    for state in ordered(found):
        for memory in MEMORIES:
            ratios = found.ratios(state, memory, found.mpis[0])
            cells = [shown(mean(v for (_, n), v in ratios.items() if n == size)) for size in sizes]
            lines.append(f"| {state} | {memory} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def placed(text: str, table: str) -> str:
    """Return the text of README.md with another table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"README.md: expected {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
