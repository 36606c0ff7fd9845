"""The file of a measured run, such as ``run.json``: the time of each action of each rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InvalidArgument
from .actions import KINDS, SHAPES, Placement
from .messages import attach
from .simulate import Costs, Span, Timeline, run
from .walk import check

FORMAT = "mpidist pipeline trace 1"


@dataclass(frozen=True)
class Trace:
    """A recorded run of a pipeline.

    Attributes
    ----------
    measured : Timeline
        The time of each action, in seconds from any common origin.
    costs : Costs
        The times of the actions in seconds; for B, `I` is its time and `W` is 0.
    peak : tuple of int
        Largest number of live activations on each rank, as the run counted them.
    """

    measured: Timeline
    costs: Costs
    peak: tuple[int, ...]

    def predict(self, costs: Costs | None = None) -> Timeline:
        """Simulate the run's own order of actions, with its measured or with other costs.

        Raises
        ------
        ScheduleError
            If the run did not have every action once, in an order that can run.
        """
        it = self.measured
        parts = attach([[span.action for span in part] for part in it.spans], it.placement)
        check(parts, it.placement, it.microbatches)
        spans = run(parts, it.placement, costs or self.costs)
        return Timeline(it.name, it.placement, it.microbatches, spans)


def write(path: str | Path, trace: Trace) -> None:
    """Write a trace to a file.

    The file is one JSON object: ``format``; ``schedule``, its name; ``stages``, the number of
    ranks; ``chunks``, virtual stages per rank; ``placement``, their layout; ``microbatches``;
    ``costs``, an object of ``F``, ``I``, ``W`` (seconds, a number, or one for each virtual stage)
    and ``message``; ``peak``, a number for each rank; and ``spans``, an array of
    ``[rank, kind, chunk, microbatch, begin, end]`` with seconds at the end.
    """
    it = trace.measured
    costs = {name: getattr(trace.costs, name) for name in ("F", "I", "W", "message")}
    spans = [
        [rank, span.action.kind, span.action.chunk, span.action.microbatch, span.begin, span.end]
        for rank, part in enumerate(it.spans)
        for span in part
    ]
    head = {
        "format": FORMAT,
        "schedule": it.name,
        "stages": it.placement.ranks,
        "chunks": it.placement.chunks,
        "placement": it.placement.shape,
        "microbatches": it.microbatches,
        "costs": costs,
        "peak": list(trace.peak),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rows = ",\n".join(json.dumps(span) for span in spans)
    text = "{" + ",\n".join([*lines, f'"spans": [\n{rows}\n]']) + "}\n"
    Path(path).write_text(text, encoding="utf-8")


def read(path: str | Path) -> Trace:
    """Return the trace that :func:`write` wrote.

    Raises
    ------
    InvalidArgument
        If the file does not exist, or is not a trace; with the reason.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"trace {path}: cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidArgument(f"trace {path}: its format is not {FORMAT!r}")
    try:
        return _build(data)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidArgument(f"trace {path}: {missing}") from error


def _build(data: dict[str, Any]) -> Trace:
    """Build a trace from a JSON object; raise ValueError, KeyError or TypeError for others."""
    if data["placement"] not in SHAPES:
        raise ValueError(f"placement {data['placement']!r}: expected {', '.join(SHAPES)}")
    counts = [data[name] for name in ("stages", "chunks", "microbatches")]
    if not all(type(count) is int and count > 0 for count in counts):
        raise ValueError("stages, chunks, microbatches: expected whole numbers >= 1")
    ranks, chunks, microbatches = counts
    parts: list[list[Span]] = [[] for _ in range(ranks)]
    for rank, kind, chunk, microbatch, begin, end in data["spans"]:
        span = [rank, kind, chunk, microbatch, begin, end]
        if not (0 <= rank < ranks and 0 <= chunk < chunks and 0 <= microbatch < microbatches):
            raise ValueError(f"span {span}: no such rank, chunk or microbatch")
        if kind not in KINDS or not begin <= end:
            raise ValueError(f"span {span}: expected F, B, I or W, with begin <= end")
        parts[rank].append(Span(KINDS[kind](microbatch, chunk), float(begin), float(end)))
    spans = tuple(tuple(sorted(part, key=lambda span: span.begin)) for part in parts)
    placement = Placement(ranks, chunks, data["placement"])
    timeline = Timeline(str(data["schedule"]), placement, microbatches, spans)
    peak = tuple(int(number) for number in data["peak"])
    if len(peak) != ranks:
        raise ValueError(f"peak has {len(peak)} numbers; expected one for each of {ranks} ranks")
    return Trace(timeline, Costs(**data["costs"]), peak)


def mean_costs(measured: Timeline, message: float = 0.0) -> Costs:
    """Return the mean times of the actions of each virtual stage; B counts as I.

    Parameters
    ----------
    measured : Timeline
        The time of each action.
    message : float
        The time of a message, which the spans do not contain.
    """
    stages = measured.placement.stages
    seconds: dict[str, list[list[float]]] = {kind: [[] for _ in range(stages)] for kind in "FIW"}
    for rank, part in enumerate(measured.spans):
        for action, begin, end in part:
            kind = "I" if action.kind == "B" else action.kind
            seconds[kind][measured.placement.stage(rank, action.chunk)].append(end - begin)
    forward, gradient, weight = (
        [sum(times) / len(times) if times else 0.0 for times in seconds[kind]] for kind in "FIW"
    )
    return Costs(forward, gradient, weight, message)
