"""When each action runs, predicted or measured; what follows from it: bubble and peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .actions import Action
from .placement import Placement


class Span(NamedTuple):
    """One action of one rank, from `begin` to `end`."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each action of each rank runs.

    Attributes
    ----------
    name : str
        The schedule.
    placement : Placement
        Where the virtual stages lie.
    microbatches : int
        Number of microbatches.
    spans : tuple of tuple of Span
        For each rank its actions, in the order of their beginning.
    """

    name: str
    placement: Placement
    microbatches: int
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def begin(self) -> float:
        """When the first action begins."""
        return min((part[0].begin for part in self.spans if part), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Time from the begin of the first action to the end of the last."""
        return max((part[-1].end for part in self.spans if part), default=0.0) - self.begin

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(span.end - span.begin for span in part) for part in self.spans)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Time that each rank waits between its own first and last action."""
        own = [part[-1].end - part[0].begin if part else 0.0 for part in self.spans]
        return tuple(span - busy for span, busy in zip(own, self.busy))

    @property
    def bubble(self) -> float:
        """Part of all ranks' time, from 0 to 1, in which they do not compute."""
        whole = self.makespan * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else 0.0

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """Activations, one for each chunk and microbatch, that are alive at most on each rank."""
        return tuple(peak_live(span.action for span in part) for part in self.spans)


def peak_live(actions: Iterable[Action]) -> int:
    """Count how many activations are alive at most: from F to the last of I and W, or to B.

    Nothing that another rank does can change it: the order of the rank's own actions decides.
    """
    live = peak = 0
    for action in actions:
        if action.kind == "F":
            live += 1
            peak = max(peak, live)
        elif action.kind != "I":
            live -= 1
    return peak
