"""What a schedule moves, by time, and the picture of it as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import groupby
from operator import attrgetter

from .machine import Proof
from .registry import Groups

STRANDS = "a: b: … strands that run side by side"
_MARGIN, _TOP, _COLUMN, _LANE, _GAP = 64, 84, 130, 24, 14
_NODES = 24  # height of the line with the numbers of the nodes
_MEANING = {
    "receive": "message",
    "reduce": "message that is combined (+)",
    "get": "read by the target",
    "put": "stored by the source",
    "fold": "combined (Σ of these ranks)",
    "copy": "local copy",
    "meet": "meeting",
}
_STYLE = (
    "text{font:12px sans-serif;fill:#222}"
    ".title{font-size:16px;font-weight:bold}"
    ".small{fill:#555}"
    ".rank{font-weight:bold;text-anchor:middle}"
    ".label,.label text{text-anchor:middle;font-size:11px}"
    ".label .left{text-anchor:start}"
    ".life{stroke:#9aa3ab;stroke-width:1.5}"
    ".grid{stroke:#d5d9dd;stroke-dasharray:3 4}"
    ".arrow{stroke-width:1.6;fill:none}"
    ".receive{stroke:#1f6fb4;marker-end:url(#receive)}#receive{fill:#1f6fb4}"
    ".reduce{stroke:#c1440e;marker-end:url(#reduce)}#reduce{fill:#c1440e}"
    ".copy{stroke:#5b6770;marker-end:url(#copy)}#copy{fill:#5b6770}"
    ".get{stroke:#2e8540;marker-end:url(#get)}#get{fill:#2e8540}"
    ".put{stroke:#7b3fa0;marker-end:url(#put)}#put{fill:#7b3fa0}"
    ".fold{stroke:#c1440e;marker-end:url(#fold)}#fold{fill:#c1440e}"
    ".meet{stroke:#444b52;stroke-width:4}"
    ".odd{stroke-dasharray:7 3}"
    ".paper{fill:#fff}.node{fill:#eef3f8}.node.odd{fill:#f8f1e6}"
    # On a page the scheme is that of the page (its color-scheme), in a viewer that of the reader.
    "@media (prefers-color-scheme:dark){"
    "text{fill:#e2e4e6}.small{fill:#a9b0b7}.life{stroke:#6f7880}.grid{stroke:#3d444b}"
    ".receive{stroke:#6cb2f0}#receive{fill:#6cb2f0}.reduce{stroke:#f58a5b}#reduce{fill:#f58a5b}"
    ".copy{stroke:#a9b4be}#copy{fill:#a9b4be}"
    ".get{stroke:#6cc27c}#get{fill:#6cc27c}.put{stroke:#c79be6}#put{fill:#c79be6}"
    ".fold{stroke:#f58a5b}#fold{fill:#f58a5b}.meet{stroke:#c5cad0}"
    ".paper{fill:#16181b}.node{fill:#1f2a36}.node.odd{fill:#332a1c}}"
)


@dataclass(frozen=True)
class Move:
    """One message between ranks, one copy within a rank, or one step in other ranks' memory."""

    time: int  # length of the longest chain of messages that ends with it, or is before a copy
    source: int
    target: int  # the source itself for a copy, a Fold and a Meet
    kind: str  # "receive" and "reduce" are messages; else "copy", "get", "put", "fold", "meet"
    sent: str  # names of the blocks at the source, and at the target: see `name_blocks`
    received: str
    strand: tuple[int, ...]  # its path, as in Strand
    send_index: int = 0  # of the step in the sender's round
    receive_index: int = 0
    ranks: tuple[int, ...] = ()  # that a Fold combines, or a Meet awaits

    @property
    def local(self) -> bool:
        """Whether it is a copy within a rank, or a Fold."""
        return self.kind in ("copy", "fold")

    @property
    def blocks(self) -> str:
        """The blocks at the source and, if they or their buffers differ, at the target."""
        return self.sent if self.sent == self.received else self.moved

    @property
    def moved(self) -> str:
        """The blocks at source and target; ``in⇒slot0[1]`` for ``in[1]`` and ``slot0[1]``."""
        source, bracket, numbers = self.sent.partition("[")
        target, _, others = self.received.partition("[")
        if bracket and source and target and numbers == others:
            return f"{source}⇒{self.received}"
        return f"{self.sent}⇒{self.received or 'out'}"


@dataclass
class Reading:
    """All messages and copies of a schedule, by time; `groups` if the algorithm depends on them."""

    title: str
    size: int
    proof: Proof
    moves: list[Move] = field(default_factory=list)
    groups: Groups | None = None

    @cached_property
    def strands(self) -> list[tuple[int, ...]]:
        """Sorted paths of the strands that have messages or copies."""
        return sorted({move.strand for move in self.moves})

    def _repr_svg_(self) -> str:
        return draw(self)

    def by_time(self) -> Iterator[tuple[int, list[Move]]]:
        """Yield each time, in ascending order, with its messages and copies."""
        for time, moves in groupby(self.moves, key=attrgetter("time")):
            yield time, list(moves)

    def name(self, strand: tuple[int, ...]) -> str:
        """Return the label of a strand in ``parallel`` by its path, such as ``a:``.

        It is empty outside of any ``parallel``, and if the schedule has only one strand.
        """
        if len(self.strands) < 2 or not strand:
            return ""
        return ".".join(_letter(number) for number in strand) + ":"


def draw(reading: Reading) -> str:
    """Return the picture of a schedule as a self-contained ``<svg>`` element."""
    column = max(_COLUMN, 24 + 7 * max((len(_label(reading, m)) for m in reading.moves), default=0))
    copies = any(m.local for m in reading.moves)
    x = [_MARGIN + 40 + column * rank for rank in range(reading.size)]
    legend, end = _legend(reading)
    width = max(x[-1] + (column if copies else 60), 9.0 * len(reading.title) + 40, end, 520)
    body: list[str] = []
    y = top = _TOP + (_NODES if reading.groups else 0)
    for time, moves in reading.by_time():
        lanes = _lanes(reading, moves)
        bottom = y + _GAP + _LANE * (max(lanes) + 1) + _GAP // 2
        name = "start" if time == 0 else str(time)
        body.append(_text(16, (y + bottom) / 2 + 4, name, "small"))
        drawn = [_arrow(reading, m, x, y + _GAP + _LANE * lane) for m, lane in zip(moves, lanes)]
        body += [arrow for arrow, _, _ in drawn]
        body.append(f'<path class="paper" d="{"".join(paper for _, paper, _ in drawn)}"/>')
        body.append(f'<g class="label">{"".join(label for _, _, label in drawn)}</g>')
        y = bottom
        body.append(_line(10, y, width - 10, y, "grid"))
    head = [_text(16, 24, reading.title, "title"), *legend, _text(16, top - 12, "time", "small")]
    for rank, at in enumerate(x):
        head.append(_text(at, top - 12, f"rank {rank}", "rank"))
        head.append(_line(at, top - 4, at, y + 8, "life"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y + 20:.0f}" '
            f'viewBox="0 0 {width:.0f} {y + 20:.0f}" role="img">',
            f"<title>{escape(reading.title)}</title>",
            f"<style>{_STYLE}</style>",
            _markers(),
            '<rect class="paper" width="100%" height="100%"/>',
            *_nodes(reading, x, top - 44, y + 12),
            *head,
            *body,
            "</svg>\n",
        ]
    )


def _nodes(reading: Reading, x: list[int], top: float, bottom: float) -> list[str]:
    """Return the SVG elements of each node: a band behind its ranks' lifelines, and its number."""
    parts = []
    half = (x[1] - x[0]) / 2 - 6 if len(x) > 1 else 40
    for number, ranks in enumerate(reading.groups or ()):
        for run in runs_of(sorted(ranks)):
            first, last = run[0], run[-1]
            left, right = x[first] - half, x[last] + half
            parts.append(
                f'<rect class="node{" odd" * (number % 2)}" x="{_n(left)}" y="{_n(top)}" '
                f'width="{_n(right - left)}" height="{_n(bottom - top)}" rx="6"/>'
            )
            middle = (x[first] + x[last]) / 2
            parts.append(_text(middle, top + 14, f"node {number}", "label small"))
    return parts


def _lanes(reading: Reading, moves: list[Move]) -> list[int]:
    """Return the lane (a line of the picture) of each of the `moves` of one time.

    Arrows in one lane do not overlap; copies are below the messages.
    """
    taken: list[list[tuple[float, float]]] = []
    lanes = []
    copying: int | None = None
    for move in moves:
        low, high = sorted((move.source, move.target))
        span = (low, low + 0.9) if move.local else (float(low), float(high))
        if move.kind == "meet":
            span = (low - 0.5, low + 0.5)
        if move.local and copying is None:
            copying = len(taken)  # below the messages, since copies follow them
        free = (
            lane
            for lane, spans in enumerate(taken)
            if (copying is None or lane >= copying)
            and all(span[1] <= a or b <= span[0] for a, b in spans)
        )
        lane = next(free, len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append(span)
        lanes.append(lane)
    return lanes


def _label(reading: Reading, move: Move) -> str:
    """Return the text on an arrow: label of the strand, "+" if the data are combined, blocks."""
    mark = {"reduce": "+", "fold": f"Σ{name_numbers(move.ranks)} "}.get(move.kind, "")
    return f"{reading.name(move.strand)}{mark}{move.blocks}".rstrip()


def _arrow(reading: Reading, move: Move, x: list[int], y: float) -> tuple[str, str, str]:
    """Return the arrow of a message or copy, the outline of the ground of its label, its label."""
    label = _label(reading, move)
    if move.kind == "meet":
        # One bar from rank to rank, that ends where the next rank is not awaited.
        rank, half = move.source, ((x[1] - x[0]) if len(x) > 1 else _COLUMN) / 2
        left, right = (half if r in move.ranks else 14 for r in (rank - 1, rank + 1))
        return _line(x[rank] - left, y, x[rank] + right, y, "arrow meet"), "", ""
    if move.local:
        at = x[move.source]
        hook = f'<path class="arrow {move.kind}" d="M{_n(at)} {_n(y)}h14v8h-11"/>'
        return hook, "", _text(at + 20, y + 8, label, "left")
    a, b = x[move.source], x[move.target]
    inset = 3 if a < b else -3
    odd = " odd" if move.strand and move.strand[-1] % 2 else ""
    # Near the sender: in the middle a label would cover another rank's line.
    middle = a + (b - a) / (2 * abs(move.target - move.source))
    height = y + 10 * (middle - a) / (b - a)
    arrow = (
        f'<path class="arrow {move.kind}{odd}" d="M{_n(a)} {_n(y)}L{_n(b - inset)} {_n(y + 10)}"/>'
    )
    if not label:
        return arrow, "", ""
    room = 6.2 * len(label) + 4
    paper = f"M{_n(middle - room / 2)} {_n(height - 7)}h{_n(room)}v14h{_n(-room)}z"
    return arrow, paper, _text(middle, height + 4, label)


def _legend(reading: Reading) -> tuple[list[str], float]:
    """Return the SVG elements of the legend, and the x coordinate of its end."""
    kinds = {move.kind for move in reading.moves}
    cut = reading.proof.block_count > 1
    strands = any(reading.name(strand) for strand in reading.strands)
    parts = []
    x = 16
    for kind in (k for k in _MEANING if k in kinds):
        parts.append(f'<path class="arrow {kind}" d="M{x} 44h30"/>')
        parts.append(_text(x + 38, 48, _MEANING[kind], "small"))
        x += 70 + 7 * len(_MEANING[kind])
    if cut:
        parts.append(_text(x, 48, "[blocks]", "small"))
        x += 76
    if strands:
        parts.append(_text(x, 48, STRANDS, "small"))
        x += 7 * len(STRANDS)
    return parts, x


def _markers() -> str:
    arrows = "".join(
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0L8 4L0 8z"/></marker>'
        for kind in _MEANING
        if kind != "meet"
    )
    return f"<defs>{arrows}</defs>"


def _text(x: float, y: float, content: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{_n(x)}" y="{_n(y)}">{escape(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}"/>'


def _n(pixels: float) -> str:
    """Return a coordinate in tenths of a pixel, without a zero at its end."""
    return f"{pixels:.1f}".removesuffix(".0")


def name_numbers(numbers: Iterable[int]) -> str:
    """Return numbers in ascending order as text, such as ``0-3,5``."""
    return ",".join(map(_span, runs_of(numbers)))


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return the runs of consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _span(run: list[int]) -> str:
    return f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run))


def _letter(number: int) -> str:
    """Return a, b, … z, aa, ab, … for 0, 1, …."""
    letters = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return letters
