"""The trace of a step, brought together from all ranks."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from ...errors import InvalidArgument
from ...pipeline import Span, Timeline
from ...pipeline.trace import Trace, mean_costs, write
from .plan import Plan


def record(
    comm: Any,
    plan: Plan,
    microbatches: int,
    spans: tuple[Span, ...],
    peak: int,
    path: str | Path,
) -> Trace:
    """Gather the spans of all ranks and have rank 0 write them; collective.

    On one node the clocks of all ranks are one; between nodes the end of a barrier is taken for the
    same moment everywhere.
    """
    comm.barrier()
    now = perf_counter()
    everyone = comm.allgather_object((now, spans, peak))
    if not all(part for _, part, _ in everyone):
        raise InvalidArgument(f"rank {comm.rank}: trace({str(path)!r}) before the first step")
    together = comm.topology.num_nodes == 1
    aligned = []
    for origin, part, _ in everyone:
        shift = 0.0 if together else origin
        aligned.append(tuple([Span(s.action, s.begin - shift, s.end - shift) for s in part]))
    start = min(part[0].begin for part in aligned)
    moved = tuple([tuple([Span(a, b - start, e - start) for a, b, e in part]) for part in aligned])
    measured = Timeline(plan.name, plan.placement, microbatches, moved)
    trace = Trace(measured, mean_costs(measured), tuple(peak for _, _, peak in everyone))
    failure = None
    if comm.rank == 0:
        try:
            write(path, trace)
        except OSError as error:
            failure = str(error)
    failure = comm.broadcast_object(failure)
    if failure:
        raise InvalidArgument(f"rank 0: trace({str(path)!r}) cannot write there: {failure}")
    return trace
