"""Statistics of a step: times of actions, live activations, and its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ..errors import InvalidArgument
from .plan import Plan
from .schedules import Costs, Span, Timeline
from .schedules.trace import Trace, mean_costs, write
from .stage import Held


class Live:
    """Counts what is alive, by objects and not by what the schedule says.

    Attributes
    ----------
    count, peak : int
        Activations of a chunk for a microbatch: now, and the most since :meth:`begin`.
    nbytes, peak_bytes : int
        The bytes that they keep for the way back, see :class:`~mpidist.pipeline.PipelineStats`.
    """

    def __init__(self) -> None:
        self.count = self.peak = self.nbytes = self.peak_bytes = 0

    def begin(self) -> None:
        """Begin to look for the most anew."""
        self.peak, self.peak_bytes = self.count, self.nbytes

    def enter(self, held: Held, nbytes: int) -> None:
        """Count an object until it is gone."""
        held.live, held.size = self, nbytes
        self.count += 1
        self.nbytes += nbytes
        self.peak = max(self.peak, self.count)
        self.peak_bytes = max(self.peak_bytes, self.nbytes)


@dataclass(frozen=True)
class PipelineStats:
    """What this rank measured.

    Attributes
    ----------
    steps : int
        How many steps there were; a forward() with its backward() is one as well.
    seconds : float
        Of a step, the mean, with the averaging of gradients.
    busy, span : float
        Of a step, means: the time in which stages computed, and the time from the beginning of the
        first action to the end of the last, without what is between forward() and backward().
    bubble : float
        Share of `span` in which nothing was computed, of the last step.
    peak_live, predicted_live : int
        The most activations of a chunk for a microbatch that were alive in the last step, counted,
        and what the schedule says.
    peak_bytes : int
        The most bytes that were kept for the way back at a time, in the last step: what stages were
        given by other ranks, what autograd or layers saved, for the loss too, what
        ``checkpoint=True`` computed again, and what I left for W.  Each memory counts once in a
        microbatch.  (Not what autograd saves in a stage that uses ``torch.func.grad`` or its kin.)
        Parameters and buffers, the batch and the target do not count, nor do random
        states and the buffers that ``checkpoint=True`` copies.
    messages, bytes, announced : int
        Messages sent so far, their bytes, and how many forms were announced.
    splits : tuple of bool
        For each chunk, whether its backward can be done in halves.
    schedule : str
        What is run.
    costs : Costs or None
        The times of all stages that ``schedule="auto"`` measured; None before, or without it.
    """

    steps: int
    seconds: float
    busy: float
    span: float
    bubble: float
    peak_live: int
    predicted_live: int
    peak_bytes: int
    messages: int
    bytes: int
    announced: int
    splits: tuple[bool, ...]
    schedule: str
    costs: Costs | None


class Clock:
    """Adds up the times of steps."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.busy, self.span = 0, 0.0, 0.0, 0.0
        self.bubble = 0.0

    def note(self, parts: Sequence[Sequence[Any]], seconds: float) -> None:
        """Take down a step: its spans, by parts that followed one another at any time."""
        busy = sum([span.end - span.begin for part in parts for span in part])
        whole = sum([part[-1].end - part[0].begin for part in parts])
        self.steps += 1
        self.seconds += seconds
        self.busy += busy
        self.span += whole
        self.bubble = 1 - busy / whole if whole else 0.0

    def mean(self, total: float) -> float:
        """Give a total by the number of steps."""
        return total / max(self.steps, 1)


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
