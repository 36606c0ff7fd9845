"""Where the time of pipeline steps goes, and how much is alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...pipeline import Costs


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
