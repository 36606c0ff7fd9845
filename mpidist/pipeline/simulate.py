"""``simulate``: when each action of a schedule runs, from the times of F, I and W."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .check import check
from .costs import Costs, Times, as_costs
from .messages import Message, Step, derive
from .placement import Placement
from .schedule import PipelineSchedule, as_schedule
from .timeline import Span, Timeline
from .walk import walk


def simulate(
    schedule: str | PipelineSchedule | Callable,
    size: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | Sequence[Times] | None = None,
) -> Timeline:
    """Give the time of each action, if each begins as soon as its rank and its message are there.

    Parameters
    ----------
    schedule : str, PipelineSchedule or callable
        A name, a schedule, or a generator function of your own.
    size, microbatches : int
        Ranks and microbatches, each ≥ 1.
    chunks : int, optional
        Virtual stages on every rank; by default what the schedule declares.
    costs : Costs or sequence, optional
        Times of F, I and W, or of F, I, W and a message; by default 1, 1, 1 and 0.

    Returns
    -------
    Timeline
        With makespan, bubble and peak live activations.

    Raises
    ------
    ScheduleError
        If the schedule is wrong; as of :func:`~mpidist.pipeline.prove`.
    """
    known = as_schedule(schedule)
    parts = derive(known, size, microbatches, chunks)
    placement = known.place(size, chunks)
    check(parts, placement, microbatches)
    return Timeline(known.name, placement, microbatches, run(parts, placement, as_costs(costs)))


def run(
    parts: Sequence[Sequence[Step]], placement: Placement, costs: Costs
) -> tuple[tuple[Span, ...], ...]:
    """Give the spans of steps that are known to be complete; see :func:`simulate`."""
    table = costs.table(placement.stages)
    times = [
        {
            (kind, chunk): table[kind][placement.stage(rank, chunk)]
            for kind in table
            for chunk in range(placement.chunks)
        }
        for rank in range(placement.ranks)
    ]
    clock = [0.0] * len(parts)
    arrival: dict[Message, float] = {}
    spans: list[list[Span]] = [[] for _ in parts]
    for rank, _, step in walk(parts, placement):
        action = step.action
        begin = clock[rank]
        if step.receive is not None:
            begin = max(begin, arrival[step.receive])
        end = begin + times[rank][action.kind, action.chunk]
        spans[rank].append(Span(action, begin, end))
        clock[rank] = end
        for message in step.sends:
            arrival[message] = end if message.local else end + costs.message
    return tuple(map(tuple, spans))
