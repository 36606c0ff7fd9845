"""``prove``: a pipeline schedule is complete, cannot deadlock, and keeps its messages bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .check import check
from .messages import Step, derive
from .outstanding import Outstanding
from .placement import Placement
from .proof import PipelineProof
from .schedule import PipelineSchedule, as_schedule
from .timeline import peak_live
from .walk import walk


def prove(
    schedule: str | PipelineSchedule | Callable,
    size: int,
    microbatches: int,
    chunks: int | None = None,
) -> PipelineProof:
    """Prove a pipeline schedule for one number of ranks, microbatches and chunks.

    It shows that every microbatch goes forward and backward once through every virtual stage, each
    F before its B (each I before its W); that the messages of an edge are taken in the order in
    which they are sent; and that no rank waits for ever, with receives posted and sends that block
    nobody.

    Parameters
    ----------
    schedule : str, PipelineSchedule or callable
        A name, a schedule, or a generator function of your own.
    size, microbatches : int
        Ranks and microbatches, each ≥ 1.
    chunks : int, optional
        Virtual stages on every rank; by default what the schedule declares.

    Returns
    -------
    PipelineProof
        Counts, and bounds on messages and live activations that hold whatever anything takes.

    Raises
    ------
    ScheduleError
        The counter-example: rank, virtual stage, step and reason.
    Unsupported
        If the schedule does not serve these numbers.
    """
    known = as_schedule(schedule)
    parts = derive(known, size, microbatches, chunks)
    return prove_parts(known.name, parts, known.place(size, chunks), microbatches)


def prove_parts(
    name: str, parts: Sequence[Sequence[Step]], placement: Placement, microbatches: int
) -> PipelineProof:
    """Prove steps that are already derived; see :func:`prove`."""
    check(parts, placement, microbatches)
    outstanding = Outstanding(placement.ranks)
    for rank, index, step in walk(parts, placement):
        outstanding.see(rank, index, step)
    return PipelineProof(
        name,
        placement.ranks,
        microbatches,
        placement.chunks,
        sum(map(len, parts)),
        outstanding.messages,
        tuple(outstanding.into(rank) for rank in range(placement.ranks)),
        outstanding.fullest_edge(),
        tuple(peak_live(step.action for step in part) for part in parts),
        any(step.action.kind == "I" for part in parts for step in part),
    )
