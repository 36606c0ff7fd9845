"""Statistics of a pipeline: times of steps, live activations, and the trace of the last step."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..communicator.agreement import from_rank_0
from ..communicator.communicator import Communicator
from ..communicator.tracing import clock_offset, writing
from ..errors import InvalidArgument
from ..measure import counted, format_time, numbers_of, round_size
from ..trace import Event
from .plan import Plan
from .schedules import Costs, Span, Timeline
from .schedules.trace import Trace, events_of, mean_costs, write


@dataclass(frozen=True)
class PipelineStats:
    """Measurements of a pipeline's steps on this rank; times in seconds.

    Attributes
    ----------
    steps : int
        Number of steps so far; a forward() with its backward() is one step.
    seconds : float
        Mean time of a step, with the averaging of gradients.
    busy, span : float
        Mean times per step: that in which stages computed, and that from the beginning of the first
        action to the end of the last, without the time between forward() and backward().
    bubble : float
        Share of the last step's span in which this rank computed nothing.
    peak_live, predicted_live : int
        Largest number of saved activations (one for each microbatch and chunk) at a time in the
        last step: as counted, and as the schedule promises.
    messages, bytes, announced : int
        Messages and bytes sent so far, and the number of headers (dtypes and shapes) among them.
    splits : tuple of bool
        For each chunk, whether its backward can run in two halves, I and W.
    schedule : str
        Name of the schedule.
    costs : Costs or None
        Times of all stages, as ``schedule="auto"`` measured them; None before that, and with other
        schedules.
    """

    steps: int
    seconds: float
    busy: float
    span: float
    bubble: float
    peak_live: int
    predicted_live: int
    messages: int
    bytes: int
    announced: int
    splits: tuple[bool, ...]
    schedule: str
    costs: Costs | None

    def __str__(self) -> str:
        steps, live = counted(self.steps, "step"), counted(self.peak_live, "live activation")
        return (
            f"{steps} by {self.schedule}: {format_time(self.seconds)} each, busy "
            f"{format_time(self.busy)} of {format_time(self.span)}, bubble {self.bubble:.1%} in "
            f"the last one, at most {live}; "
            f"{counted(self.messages, 'message')}, "
            f"{round_size(self.bytes)} bytes"
        )

    def scalars(self) -> dict[str, float]:
        """Return all numbers by name, for TensorBoard, W&B or a CSV file."""
        return numbers_of(self)


class LastStep(NamedTuple):
    """The last step that had a backward."""

    plan: Plan
    spans: tuple[Span, ...]  # the actions of this rank; empty before the first step
    peak: int  # live activations, as counted
    predicted: int  # live activations, as the schedule promises
    step: int = 0  # number of the step, from 0

    def events(self, comm: Communicator, microbatches: int) -> list[Event]:
        """Return the events of this rank's last step, for a trace file."""
        line = Timeline(self.plan.name, self.plan.placement, microbatches, ())
        return events_of(comm.name, line, comm.rank, self.step, self.peak, self.spans)


class StepTimes:
    """Sums of the measured times of a pipeline's steps, in seconds, and the last step's bubble.

    The bubble is the share of the step's span, from 0 to 1, in which the rank computed nothing.
    """

    def __init__(self) -> None:
        self.steps, self.seconds, self.busy, self.span = 0, 0.0, 0.0, 0.0
        self.bubble = 0.0

    def note(self, parts: Sequence[Sequence[Span]], seconds: float) -> None:
        """Add the times of a step, which took `seconds` in all.

        `parts` has the spans of step() as one part, or those of forward() and backward() as two.
        """
        busy = sum([end - begin for part in parts for _, begin, end in part])
        whole = sum([part[-1].end - part[0].begin for part in parts])
        self.steps += 1
        self.seconds += seconds
        self.busy += busy
        self.span += whole
        self.bubble = 1 - busy / whole if whole else 0.0

    def mean(self, total: float) -> float:
        """Return a total divided by the number of steps."""
        return total / max(self.steps, 1)


def record(comm: Communicator, last: LastStep, microbatches: int, path: str | Path) -> Trace:
    """Gather the last step of all ranks, write it on rank 0, and return it; collective.

    All times are by the clock of rank 0, from the beginning of the first action.
    """
    everyone = comm.allgather_object(
        (clock_offset(comm)[0], last.spans, last.peak, socket.gethostname())
    )
    if not all(part for _, part, *_ in everyone):
        raise InvalidArgument(
            f"rank {comm.rank}: trace({str(path)!r}) before the first step: expected a step(), or "
            "a forward() and a backward(), before it"
        )
    # Clocks of different nodes differ by more than an action takes: all are set by rank 0's.
    aligned = []
    for shift, part, *_ in everyone:
        aligned.append(tuple([Span(s.action, s.begin - shift, s.end - shift) for s in part]))
    start = min(part[0].begin for part in aligned)
    moved = tuple([tuple([Span(a, b - start, e - start) for a, b, e in part]) for part in aligned])
    measured = Timeline(last.plan.name, last.plan.placement, microbatches, moved)
    trace = Trace(measured, mean_costs(measured), tuple(peak for _, _, peak, _ in everyone))

    def save() -> None:
        with writing(path):
            write(path, trace, comm.name, last.step, [host for *_, host in everyone])

    from_rank_0(comm, save, "trace()")
    return trace
