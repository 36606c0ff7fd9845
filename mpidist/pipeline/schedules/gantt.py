"""The timeline of a pipeline, and its figure as boxes and labels, for SVG and PNG alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import NamedTuple

from .actions import MEANINGS, Action, Placement
from .walk import peak_live

COLOURS = {"F": "#1f6fb4", "B": "#2a8a57", "I": "#0f9b9b", "W": "#d98a1c"}
_LOOKS = {
    "title": 'font-size="16" font-weight="bold"',
    "bold": 'font-size="12" font-weight="bold"',
    "plain": 'font-size="12"',
    "right": 'font-size="12" text-anchor="end"',
}
# Light colours are attributes, since some viewers read no style sheets; dark ones are here.
_DARK = (
    "<style>@media (prefers-color-scheme:dark){"
    ".paper{fill:#16181b}.ground{fill:#262a2f}.box{stroke:#16181b}.word{fill:#e2e4e6}}</style>"
)
_LEFT, _RIGHT, _TOP, _ROW, _NOTE = 70, 20, 84, 26, 18
_NARROWEST, _WIDEST, _PAGE = 18.0, 30.0, 1500.0  # pixels: of a typical action, of the picture


class Span(NamedTuple):
    """One action of one rank with the times of its begin and end, in the timeline's unit."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The time of each action of each rank.

    All times are in the unit of the costs that were simulated; if they were measured, in seconds.

    Attributes
    ----------
    name : str
        Name of the schedule.
    placement : Placement
        Which rank holds which virtual stage.
    microbatches : int
        Number of microbatches.
    spans : tuple of tuple of Span
        The actions of each rank, in order.
    """

    name: str
    placement: Placement
    microbatches: int
    spans: tuple[tuple[Span, ...], ...]

    def _repr_svg_(self) -> str:
        return svg(sheet(self.name, (Panel(self),)))

    @cached_property
    def begin(self) -> float:
        """The time at which the first action begins."""
        return min((part[0].begin for part in self.spans if part), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """The time from the beginning of the first action to the end of the last."""
        return max((part[-1].end for part in self.spans if part), default=0.0) - self.begin

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time for which each rank computes."""
        return tuple(sum(span.end - span.begin for span in part) for part in self.spans)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """The time for which each rank waits between its own first and last action."""
        own = [part[-1].end - part[0].begin if part else 0.0 for part in self.spans]
        return tuple(span - busy for span, busy in zip(own, self.busy))

    @property
    def bubble(self) -> float:
        """The share of the makespan, from 0 to 1, in which a rank does not compute (mean)."""
        whole = self.makespan * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else 0.0

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """Largest number of live activations (of a chunk for a microbatch) on each rank."""
        return tuple(peak_live(span.action for span in part) for part in self.spans)


@dataclass(frozen=True)
class Panel:
    """One timeline of the figure, with a heading above it and notes below it."""

    timeline: Timeline
    heading: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Box:
    """A coloured rectangle for an action, with the microbatch's number where there is room.

    Position and size are in pixels; `dark` is whether the colour is, and the text white.
    """

    x: float
    y: float
    width: float
    height: float
    colour: str
    text: str
    dark: bool

    @property
    def border(self) -> float:
        """Width of the white border; it leaves at least half of a thin box."""
        return min(0.8, self.width / 4)


@dataclass(frozen=True)
class Label:
    """Text that begins at a position; `style` is ``title``, ``bold``, ``plain`` or ``right``.

    A ``right`` label is aligned to the right: it ends there.
    """

    x: float
    y: float
    text: str
    style: str = "plain"


@dataclass
class Sheet:
    """A laid-out figure: boxes and labels, in pixels from the upper left corner.

    `ground` has a grey background rectangle for each rank: x, y, width and height.
    """

    title: str
    width: float = 0.0
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    ground: list[tuple[float, float, float, float]] = field(default_factory=list)


def sheet(title: str, panels: Sequence[Panel]) -> Sheet:
    """Lay out timelines one under the other, on a common time scale."""
    whole = max((panel.timeline.makespan for panel in panels), default=0.0)
    spans = [s for panel in panels for part in panel.timeline.spans for s in part]
    lengths = sorted(span.end - span.begin for span in spans if span.end > span.begin)
    # A quarter of the actions may be too short for a number; one short one must not widen them all.
    usual = lengths[len(lengths) // 4] if lengths else 1.0
    scale = _NARROWEST / usual
    if whole:
        scale = min(max(scale, min(_WIDEST / usual, 700 / whole)), _PAGE / whole)
    made = Sheet(title)
    words = [len(title) * 9.0] + [7.0 * len(note) for panel in panels for note in panel.notes]
    made.width = max(_LEFT + whole * scale + _RIGHT, 32 + max(words), 420)
    made.labels.append(Label(16, 28, title, "title"))
    _legend(made, {span.action.kind for span in spans}, panels)
    y = float(_TOP)
    for panel in panels:
        y = _panel(made, panel, y, scale, whole)
    made.height = y
    return made


def _legend(made: Sheet, kinds: set[str], panels: Sequence[Panel]) -> None:
    """Add the legend to the sheet `made`: colours of `kinds` of actions, and shades of chunks."""
    x = 16.0
    for kind in (kind for kind in MEANINGS if kind in kinds):
        made.boxes.append(Box(x, 42, 18, 16, COLOURS[kind], kind, True))
        made.labels.append(Label(x + 24, 55, MEANINGS[kind]))
        x += 46 + 6.8 * len(MEANINGS[kind])
    if any(panel.timeline.placement.chunks > 1 for panel in panels):
        made.labels.append(Label(x, 55, "the lighter, the later the chunk"))
        made.width = max(made.width, x + 230)


def _panel(made: Sheet, panel: Panel, y: float, scale: float, whole: float) -> float:
    """Add one timeline to the sheet `made`, from `y` on; return the y at which it ends.

    `y` is in pixels from the top, `scale` in pixels per unit of time; `whole` is the longest time
    among the panels.
    """
    line = panel.timeline
    room = 7 * len(str(line.microbatches - 1)) + 3  # a number in every box, or in none
    if panel.heading:
        made.labels.append(Label(16, y + 10, panel.heading, "bold"))
        y += 22
    for rank, part in enumerate(line.spans):
        made.ground.append((_LEFT, y + 1, whole * scale, _ROW - 2))
        made.labels.append(Label(_LEFT - 8, y + 17, f"rank {rank}", "right"))
        for action, begin, end in part:
            x, width = _LEFT + (begin - line.begin) * scale, (end - begin) * scale
            share = action.chunk / max(1, line.placement.chunks - 1)
            text = str(action.microbatch) if width >= room else ""
            colour = _lighter(COLOURS[action.kind], 0.55 * share)
            made.boxes.append(Box(x, y + 1, width, _ROW - 2, colour, text, share < 0.5))
        y += _ROW
    for note in panel.notes:
        y += _NOTE
        made.labels.append(Label(16, y, note))
    return y + 22


def _lighter(colour: str, share: float) -> str:
    """Return a colour (#rrggbb) mixed with white; `share` is the share of white, from 0 to 1."""
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def svg(made: Sheet) -> str:
    """Return a sheet as a self-contained ``<svg>`` element without scripts and references."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{made.width:.0f}" '
        f'height="{made.height:.0f}" viewBox="0 0 {made.width:.0f} {made.height:.0f}" role="img">',
        f"<title>{escape(made.title)}</title>",
        _DARK,
        '<rect class="paper" width="100%" height="100%" fill="#fff"/>',
    ]
    for x, y, width, height in made.ground:
        parts.append(
            f'<rect class="ground" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" '
            f'fill="#eef0f2"/>'
        )
    parts.append('<g class="box" stroke="#fff" stroke-width="0.8">')
    for box in made.boxes:
        border = f' stroke-width="{box.border:.2g}"' if box.border < 0.8 else ""
        parts.append(
            f'<rect x="{box.x:.6g}" y="{box.y:.6g}" width="{box.width:.4g}" '
            f'height="{box.height:g}" fill="{box.colour}"{border}/>'
        )
    parts.append('</g><g font-family="sans-serif" font-size="11" text-anchor="middle">')
    for box in filter(lambda box: box.text, made.boxes):
        x, y = box.x + box.width / 2, box.y + box.height / 2 + 4
        colour = "#fff" if box.dark else "#222"
        parts.append(f'<text x="{x:.6g}" y="{y:.6g}" fill="{colour}">{escape(box.text)}</text>')
    parts.append('</g><g font-family="sans-serif" fill="#222" class="word">')
    for word in made.labels:
        at = f'x="{word.x:.1f}" y="{word.y:.1f}"'
        parts.append(f"<text {at} {_LOOKS[word.style]}>{escape(word.text)}</text>")
    return "\n".join([*parts, "</g></svg>\n"])
