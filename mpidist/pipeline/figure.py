"""The textbook figure of a pipeline as text: ranks down, time across."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from .actions import Action
from .timeline import Span, Timeline

Piece = tuple[str, str]
"""Characters, and the kind of action that they show; an empty kind between actions."""

MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
}
FINEST = 4  # slots of the shortest action; with more of them, times are rounded to columns
COARSE = 160  # columns at most of a figure whose times are rounded


def figure(timeline: Timeline, columns: int | None = None, end: float | None = None) -> str:
    """Draw a timeline as text: a line for each rank.

    Parameters
    ----------
    timeline : Timeline
        What is to be drawn.
    columns : int, optional
        Room for a line; by default as much as it takes.
    end : float, optional
        What the right end is to be, to compare timelines; by default the makespan.

    Returns
    -------
    str
        Lines without blanks at their ends.
    """
    lines = ("".join(text for text, _ in line) for line in pieces(timeline, columns, end))
    return "\n".join(line.rstrip() for line in lines)


def pieces(
    timeline: Timeline, columns: int | None = None, end: float | None = None
) -> list[list[Piece]]:
    """Give the lines of :func:`figure` in pieces, for those who colour them."""
    heads = [f"rank {rank}" for rank in range(len(timeline.spans))]
    margin = max(map(len, heads)) + 2
    whole = timeline.makespan if end is None else end
    longest = max((len(label(s.action, timeline)) for p in timeline.spans for s in p), default=1)
    slot = _slot(timeline)
    room = None if columns is None else columns - margin
    if slot and (room is None or whole / slot * (longest + 1) <= room):
        per_time = (longest + 1) / float(slot)
        idle = "." + " " * longest
    else:
        fitting = (longest + 1) / _shortest(timeline) * whole if whole else 0.0
        per_time = min(fitting, room or COARSE) / whole if whole else 0.0
        idle = "."
    lines = []
    for head, part in zip(heads, timeline.spans):
        line: list[Piece] = [(head.ljust(margin), "")]
        line += _rank(part, timeline, per_time, idle, round(whole * per_time))
        lines.append(line)
    return lines


def label(action: Action, timeline: Timeline) -> str:
    """Give what stands for an action: kind, microbatch, and a letter for the chunk if several."""
    chunk = chr(ord("a") + action.chunk % 26) if timeline.placement.chunks > 1 else ""
    return f"{action.kind}{action.microbatch}{chunk}"


def _slot(timeline: Timeline) -> Fraction | None:
    """Give the longest time that all begins and ends are multiples of, if there are few of them."""
    slot = Fraction(0)
    for part in timeline.spans:
        for span in part:
            for time in (span.begin - timeline.begin, span.end - timeline.begin):
                exact = Fraction(time).limit_denominator(1000)
                if abs(exact - Fraction(time)) > Fraction(1, 10**9):
                    return None
                slot = _common(slot, exact)
    return slot if slot and _shortest(timeline) / slot <= FINEST else None


def _shortest(timeline: Timeline) -> float:
    """Give how long the shortest action takes, of those that take any time."""
    times = (span.end - span.begin for part in timeline.spans for span in part)
    return min((time for time in times if time > 0), default=1.0)


def _common(a: Fraction, b: Fraction) -> Fraction:
    """Give the greatest common divisor of two fractions."""
    below = math.lcm(a.denominator, b.denominator)
    return Fraction(math.gcd(int(a * below), int(b * below)), below)


def _rank(
    part: Sequence[Span], timeline: Timeline, per_time: float, idle: str, width: int
) -> list[Piece]:
    """Give the pieces of one rank's line."""
    line: list[Piece] = []
    at = 0
    begins = [round((span.begin - timeline.begin) * per_time) for span in part]
    for (action, begin, end), start, following in zip(part, begins, [*begins[1:], width]):
        first = max(at, start)
        last = max(first, round((end - timeline.begin) * per_time))
        if end > begin:  # what is short is seen where there is room for it
            last = max(last, min(first + 1, following))
        line.append((_idle(idle, at, first), ""))
        text = label(action, timeline)
        free = last - first
        if free > len(text):
            text += "-" * (free - len(text) - 1) + " "
        line.append((text[:free], action.kind))
        at = last
    line.append((_idle(idle, at, width), ""))
    return [piece for piece in line if piece[0]]


def _idle(idle: str, first: int, last: int) -> str:
    """Give what stands for waiting, in step with the slots of the whole figure."""
    return "".join(idle[k % len(idle)] for k in range(first, last))
