"""Pictures of pipeline schedules: ``text`` for the terminal, ``svg`` for documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...measure import counted
from ...schedule.notebook import Svg
from . import gantt
from .actions import MEANINGS, Action
from .gantt import Span, Timeline
from .messages import derived
from .prove import PipelineProof, prove_parts
from .schedule import PipelineSchedule
from .simulate import Costs, Times, as_costs, run
from .trace import Trace

TextPiece = tuple[str, str]
"""Characters, and the kind of the action that they draw; an empty kind between actions."""
FINEST = 4  # most slots of the shortest action; beyond, times are rounded to columns
COARSE = 160  # most columns of a figure whose times are rounded


def figure(timeline: Timeline, columns: int | None = None, end: float | None = None) -> str:
    """Draw a timeline as text: a line for each rank, without trailing blanks.

    `columns` is the largest width of a line; by default as wide as needed, but about 160 at most
    where times must be rounded to columns.  `end` is the time from the first action to the right
    end, to draw timelines on one scale; by default the makespan.
    """
    lines = ("".join(text for text, _ in line) for line in pieces(timeline, columns, end))
    return "\n".join(line.rstrip() for line in lines)


def pieces(
    timeline: Timeline, columns: int | None = None, end: float | None = None
) -> list[list[TextPiece]]:
    """Return the lines of :func:`figure`, each cut into pieces that can be coloured.

    A piece is (text, kind): the text of one action and its kind, or text between actions and "".
    """
    heads = [f"rank {rank}" for rank in range(len(timeline.spans))]
    margin = max(map(len, heads)) + 2
    whole = timeline.makespan if end is None else end
    longest = max((len(label(s.action, timeline)) for p in timeline.spans for s in p), default=1)
    slot = _slot(timeline)
    room = None if columns is None else columns - margin
    # One label a slot: then columns are exact multiples of the times, and nothing is rounded.
    if slot and (room is None or whole / slot * (longest + 1) <= room):
        per_time = (longest + 1) / float(slot)
        idle = "." + " " * longest
    else:
        fitting = (longest + 1) / _shortest(timeline) * whole if whole else 0.0
        per_time = min(fitting, room or COARSE) / whole if whole else 0.0
        idle = "."
    lines = []
    for head, part in zip(heads, timeline.spans):
        line: list[TextPiece] = [(head.ljust(margin), "")]
        line += _rank(part, timeline, per_time, idle, round(whole * per_time))
        lines.append(line)
    return lines


def label(action: Action, timeline: Timeline) -> str:
    """Return the label of an action: kind, microbatch, and a letter for the chunk if several."""
    chunk = chr(ord("a") + action.chunk % 26) if timeline.placement.chunks > 1 else ""
    return f"{action.kind}{action.microbatch}{chunk}"


def _slot(timeline: Timeline) -> Fraction | None:
    """Return the largest unit of time of which the begin and end of every action are multiples.

    None if there is none, or the shortest action would be more than 4 units long.
    """
    slot = Fraction(0)
    for part in timeline.spans:
        for span in part:
            for time in (span.begin - timeline.begin, span.end - timeline.begin):
                # Sums of floats such as 0.1 miss their fraction by a rounding; measured times have
                # no such fraction.
                exact = Fraction(time).limit_denominator(1000)
                if abs(exact - Fraction(time)) > Fraction(1, 10**9):
                    return None
                slot = _common(slot, exact)
    return slot if slot and _shortest(timeline) / slot <= FINEST else None


def _shortest(timeline: Timeline) -> float:
    """Return the shortest time > 0 that an action takes; 1 if there is none."""
    times = (span.end - span.begin for part in timeline.spans for span in part)
    return min((time for time in times if time > 0), default=1.0)


def _common(a: Fraction, b: Fraction) -> Fraction:
    """Return the greatest common divisor of two fractions."""
    below = math.lcm(a.denominator, b.denominator)
    return Fraction(math.gcd(int(a * below), int(b * below)), below)


def _rank(
    part: Sequence[Span], timeline: Timeline, per_time: float, idle: str, width: int
) -> list[TextPiece]:
    """Return one rank's line, `width` columns wide, as pieces (text, kind of action or "").

    `per_time` is columns per unit of time; `idle` is the pattern drawn between actions.
    """
    line: list[TextPiece] = []
    at = 0
    begins = [round((span.begin - timeline.begin) * per_time) for span in part]
    for (action, begin, end), start, following in zip(part, begins, [*begins[1:], width]):
        first = max(at, start)
        last = max(first, round((end - timeline.begin) * per_time))
        if end > begin:  # a short action is drawn if there is room
            last = max(last, min(first + 1, following))
        line.append((_idle(idle, at, first), ""))
        whole, free = label(action, timeline), last - first
        text = next((t for t in (whole, whole[1:], action.kind) if len(t) <= free), "")
        if free > len(text):
            text += "-" * (free - len(text) - 1) + " "
        line.append((text, action.kind))
        at = last
    line.append((_idle(idle, at, width), ""))
    return [piece for piece in line if piece[0]]


def _idle(idle: str, first: int, last: int) -> str:
    """Return the pattern `idle` for columns `first` to `last`, repeated from column 0 on."""
    return "".join(idle[k % len(idle)] for k in range(first, last))


@dataclass(frozen=True)
class Picture:
    """A title, and timelines with headings and notes."""

    title: str
    panels: tuple[gantt.Panel, ...]

    def text(self, columns: int | None = None) -> str:
        """Return the picture as lines of text, with timelines at most `columns` wide."""
        lines = ("".join(text for text, _ in line) for line in self.lines(columns))
        return "\n".join(line.rstrip() for line in lines)

    def lines(self, columns: int | None = None) -> list[list[TextPiece]]:
        """Return the lines of :meth:`text`, each cut into pieces (text, kind) to be coloured.

        The pieces are those of :func:`pieces`; the kind of a title or heading is "title".
        """
        lines: list[list[TextPiece]] = [[(self.title, "title")], [(legend(self.panels), "")]]
        whole = max(panel.timeline.makespan for panel in self.panels)
        figures = [pieces(panel.timeline, columns, whole) for panel in self.panels]
        shown = (text for figure in figures for row in figure for text, kind in row if kind)
        if any(text[0].isdecimal() for text in shown):
            lines.append(
                [("A number alone is the microbatch of an action too short for its letter.", "")]
            )
        for panel, drawn in zip(self.panels, figures):
            lines.append([])
            if panel.heading:
                lines.append([(panel.heading, "title")])
            lines += drawn
            lines += [[(note, "")] for note in (*panel.notes, *_left_out(panel.timeline, drawn))]
        return lines

    def svg(self) -> str:
        """Return the picture as a self-contained ``<svg>`` element."""
        return gantt.svg(self.sheet())

    _repr_svg_ = svg

    def sheet(self) -> gantt.Sheet:
        """Return the picture laid out as boxes and labels, to be drawn as SVG or PNG."""
        return gantt.sheet(self.title, self.panels)


def picture(
    schedule: str | PipelineSchedule | Callable,
    size: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | Sequence[Times] | None = None,
) -> Picture:
    """Return the picture of a schedule, proved and simulated.

    Parameters and errors are those of :func:`~mpidist.pipeline.simulate`.
    """
    times = as_costs(costs)
    name, place, parts = derived(schedule, size, microbatches, chunks)
    proof = prove_parts(name, parts, place, microbatches)
    line = Timeline(name, place, microbatches, run(parts, place, times))
    panel = gantt.Panel(line, "", (*notes(line, "{:.4g}".format), outstanding(proof)))
    return Picture(f"{caption(line)}: {_words(times)}", (panel,))


def comparison(trace: Trace, costs: Costs | None = None) -> Picture:
    """Return a picture of two timelines: the predicted one, and below it the measured one.

    The prediction simulates the run's own order of actions, by default with its mean times.
    """
    measured = trace.measured
    predicted = trace.predict(costs)
    times, peaks = notes(measured, _seconds)
    if trace.peak != measured.peak:
        peaks += f"; counted by the run: {_numbers(trace.peak)}"
    over = gantt.Panel(predicted, "predicted", notes(predicted, _seconds))
    below = gantt.Panel(measured, "measured", (times, peaks))
    return Picture(caption(measured), (over, below))


def text(
    schedule: str | PipelineSchedule | Callable,
    size: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | Sequence[Times] | None = None,
) -> str:
    """Draw a schedule as text: a line for each rank, time from left to right.

    Parameters and errors are those of :func:`~mpidist.pipeline.simulate`.

    Returns
    -------
    str
        Lines without a newline at the end; below the figure makespan, bubble, and the peaks of live
        activations and of outstanding messages.
    """
    return picture(schedule, size, microbatches, chunks, costs).text()


def svg(
    schedule: str | PipelineSchedule | Callable,
    size: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | Sequence[Times] | None = None,
) -> str:
    """Draw a schedule as a self-contained SVG.

    Parameters and errors are those of :func:`~mpidist.pipeline.simulate`.
    """
    return Svg(picture(schedule, size, microbatches, chunks, costs).svg())


def caption(line: Timeline) -> str:
    """Return the name, ranks and microbatches of a timeline as text."""
    ranks, chunks, count = line.placement.ranks, line.placement.chunks, line.microbatches
    of = f", {chunks} chunks each" if chunks > 1 else ""
    return f"{line.name} on {counted(ranks, 'rank')}{of}, {counted(count, 'microbatch', 'es')}"


def legend(panels: Sequence[gantt.Panel]) -> str:
    """Return the legend of a drawing: what the letters of its actions mean."""
    kinds = {span.action.kind for p in panels for part in p.timeline.spans for span in part}
    marks = [f"{kind} {words}" for kind, words in MEANINGS.items() if kind in kinds]
    if any(panel.timeline.placement.chunks > 1 for panel in panels):
        marks.append("a, b, … chunks")
    return "   ".join([*marks, ". waits"])


def notes(line: Timeline, write: Callable[[float], str]) -> tuple[str, str]:
    """Return two lines of text on a timeline: its times, and its peaks of live activations.

    The times are makespan, bubble and idle time of each rank; ``write(time)`` returns one as text.
    """
    rounding = 1e-9 * line.makespan  # of sums of times
    idle = ", ".join(write(time if time > rounding else 0.0) for time in line.idle)
    of = "chunks of microbatches" if line.placement.chunks > 1 else "microbatches"
    return (
        f"makespan {write(line.makespan)}, bubble {100 * line.bubble:.1f} % of all ranks' time; "
        f"within a rank's own span: {idle}",
        f"peak live activations by rank: {_numbers(line.peak)} ({of})",
    )


def _left_out(line: Timeline, drawn: Sequence[Sequence[TextPiece]]) -> list[str]:
    """Return a note on the actions too short for a column of their own, in a list; [] if none are.

    `drawn` is what :func:`pieces` returned for the timeline `line`.
    """
    spans = [span for part in line.spans for span in part if span.end > span.begin]
    missing = len(spans) - sum(bool(kind) for row in drawn for _, kind in row)
    if missing <= 0:
        return []
    short = f"{counted(missing, 'action')} too short to be drawn here: see --png or --svg"
    return [short]


def outstanding(proof: PipelineProof) -> str:
    """Return the number of messages, and the most that can be sent and not yet used, as text."""
    return (
        f"{counted(proof.messages, 'message')}; outstanding at most, to each rank: "
        f"{_numbers(proof.outstanding)}; on one edge: {proof.outstanding_edge}"
    )


def _words(costs: Costs) -> str:
    """Return the times of the actions as text, such as "F 1, I 1, W 1"."""

    def write(time: Times) -> str:
        if isinstance(time, float):
            return f"{time:g}"
        return "/".join(f"{t:g}" for t in time)

    message = f", message {costs.message:g}" if costs.message else ""
    return f"F {write(costs.F)}, I {write(costs.I)}, W {write(costs.W)}{message}"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _seconds(time: float) -> str:
    """Return a time in seconds as text in a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if time >= size:
            return f"{time / size:.3g} {unit}"
    return f"{time * 1e6:.3g} µs" if time else "0"
