"""The file of a measured pipeline step, such as ``run.json``: times of the actions of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...errors import InvalidArgument
from ...foreign import shown, typed
from ...trace import Event, RankEvents
from ...trace import read as read_events
from ...trace import write as write_events
from .actions import KINDS, SHAPES, Placement
from .gantt import Span, Timeline
from .messages import with_messages
from .simulate import Costs, run
from .walk import check

STEP, ACTION = "pipeline step", "pipeline"  # categories of events


@dataclass(frozen=True)
class Trace:
    """A recorded run of a pipeline.

    Attributes
    ----------
    measured : Timeline
        The time of each action, in seconds from any common origin.
    costs : Costs
        The mean times of each stage's actions in seconds; the time of B is in `I`.
    peak : tuple of int
        Largest number of live activations on each rank, as the run counted them.
    """

    measured: Timeline
    costs: Costs
    peak: tuple[int, ...]

    def predict(self, costs: Costs | None = None) -> Timeline:
        """Simulate the run's own order of actions, with `costs` or, for None, its mean times.

        Raises
        ------
        ScheduleError
            If the run did not have every action once, in an order that can run.
        """
        it = self.measured
        parts = with_messages([[span.action for span in part] for part in it.spans], it.placement)
        check(parts, it.placement, it.microbatches)
        spans = run(parts, it.placement, costs or self.costs)
        return Timeline(it.name, it.placement, it.microbatches, spans)


def events_of(
    name: str, line: Timeline, rank: int, step: int, peak: int, spans: Sequence[Span]
) -> list[Event]:
    """Return the events of a rank's step in a trace file: the step itself, then its actions.

    `name` is that of the pipeline's communicator, which tells several pipelines of a file apart;
    `line` has the schedule, placement and number of microbatches (its spans are not used).
    """
    if not spans:
        return []
    place = line.placement
    step_of = {"pipeline": name, "step": step, "rank": rank}
    facts = {
        **{**step_of, "schedule": line.name, "microbatches": line.microbatches, "peak": peak},
        **{"stages": place.ranks, "chunks": place.chunks, "placement": place.shape},
    }
    begin, end = spans[0].begin, spans[-1].end
    events = [Event(f"step {step}", STEP, begin, end, "pipeline", facts)]
    for action, begin, end in spans:
        letters = {"kind": action.kind, "chunk": action.chunk, "microbatch": action.microbatch}
        events.append(Event(str(action), ACTION, begin, end, "pipeline", {**step_of, **letters}))
    return events


def write(
    path: str | Path,
    trace: Trace,
    name: str = "pipeline",
    step: int = 0,
    hosts: Sequence[str] = (),
) -> None:
    """Write a trace file (see :mod:`mpidist.trace`) with one step of a pipeline.

    For `name` and `step` see :func:`events_of`; `hosts` has the host of each rank, if known.
    """
    it = trace.measured
    hosts = hosts or [""] * len(it.spans)
    ranks = [
        RankEvents(
            rank, hosts[rank], 0.0, False, events_of(name, it, rank, step, trace.peak[rank], part)
        )
        for rank, part in enumerate(it.spans)
    ]
    write_events(path, ranks)


def read(path: str | Path) -> Trace:
    """Return the last step that all ranks recorded, from a trace file.

    The file is one of :meth:`mpidist.Pipeline.trace` or :meth:`mpidist.Communicator.trace`.  Of
    several pipelines in it, the one with the first name in the alphabet is taken.

    Raises
    ------
    InvalidArgument
        If the file does not exist, or has no such step; with the reason.
    """
    events = read_events(path)
    try:
        return _build(events)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"trace {shown(str(path))}: {error}") from error


@dataclass
class _Step:
    """What is read of the facts of a step; see :func:`events_of`."""

    pipeline: str
    step: int
    rank: int
    schedule: str
    microbatches: int
    peak: int
    stages: int
    chunks: int
    placement: str


@dataclass
class _Action:
    pipeline: str
    step: int
    rank: int
    kind: str
    chunk: int
    microbatch: int


_LONGEST = 1e15  # microseconds


def _facts(event: dict[str, Any], kind: type) -> Any:
    """Return the facts of an event that `kind` has; TypeError if one is wrong."""
    facts = typed(event.get("args"), dict[str, Any], "args")
    names = {each.name for each in fields(kind)}
    return typed({n: value for n, value in facts.items() if n in names}, kind, "args")


def _build(events: Sequence[dict[str, Any]]) -> Trace:
    """Return the trace that a file's events contain; see :func:`read`.

    ValueError or TypeError if they are not those of a pipeline.
    """
    steps: dict[tuple[str, int], dict[int, _Step]] = {}
    for event in events:
        if event.get("cat") == STEP:
            head = _facts(event, _Step)
            steps.setdefault((head.pipeline, head.step), {})[head.rank] = head
    whole = [
        key
        for key, heads in steps.items()
        if sorted(heads) == list(range(len(heads))) and len(heads) == heads[0].stages
    ]
    if not whole:
        raise ValueError("no step of a pipeline in it was recorded by all ranks")
    pipeline = min(whole)[0]
    step = max(number for name, number in whole if name == pipeline)
    heads = steps[pipeline, step]
    head = heads[0]
    if head.placement not in SHAPES:
        raise ValueError(f"placement {head.placement!r:.60}: expected {', '.join(SHAPES)}")
    stages, chunks, microbatches = head.stages, head.chunks, head.microbatches
    if min(stages, chunks, microbatches) < 1:
        raise ValueError("stages, chunks and microbatches: expected whole numbers >= 1")
    # Before lists of these lengths are made: the file may be anyone's, and its numbers too.
    if stages * chunks * microbatches > len(events):
        raise ValueError(
            f"{len(events)} events are less than those of {stages} stages, {chunks} chunks and "
            f"{microbatches} microbatches"
        )
    parts: list[list[Span]] = [[] for _ in range(stages)]
    for event in events:
        if event.get("cat") != ACTION:
            continue
        facts = _facts(event, _Action)
        if (facts.pipeline, facts.step) != (pipeline, step):
            continue
        rank, kind, chunk, microbatch = facts.rank, facts.kind, facts.chunk, facts.microbatch
        if not (0 <= rank < stages and 0 <= chunk < chunks and 0 <= microbatch < microbatches):
            raise ValueError(f"action {facts}: no such rank, chunk or microbatch")
        first, lasts = (typed(event.get(name), float, name) for name in ("ts", "dur"))
        if kind not in KINDS or not (0 <= lasts <= _LONGEST and abs(first) <= _LONGEST):
            raise ValueError(f"action {facts}: expected F, B, I or W, with dur >= 0")
        begin, end = first * 1e-6, (first + lasts) * 1e-6
        parts[rank].append(Span(KINDS[kind](microbatch, chunk), begin, end))
    spans = tuple(tuple(sorted(part, key=lambda span: span.begin)) for part in parts)
    placement = Placement(stages, chunks, head.placement)
    timeline = Timeline(shown(head.schedule), placement, microbatches, spans)
    peak = tuple(heads[rank].peak for rank in range(stages))
    return Trace(timeline, mean_costs(timeline), peak)


def mean_costs(measured: Timeline, message: float = 0.0) -> Costs:
    """Return the mean times of each virtual stage's actions as Costs; times of B are in `I`.

    Parameters
    ----------
    measured : Timeline
        The time of each action.
    message : float
        The time of a message, which the timeline does not contain.
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
