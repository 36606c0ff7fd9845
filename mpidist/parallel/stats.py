"""Where the time of a training step goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from .transport import Spans


@dataclass(frozen=True)
class Stats:
    """Times of training steps on this rank, in seconds, means over all steps so far.

    A step lasts from its first forward to the end of ``sync_gradients()``.

    Attributes
    ----------
    steps : int
        How many there were.
    compute : float
        Forward, loss and backward, without what follows.
    exposed : float
        What training waited for: all of ``sync_gradients()``, and the beginning of communication
        within backward.
    communication : float
        Time during which at least one bucket was under way; waiting for slower ranks is in it.
    hidden : float
        What of `communication` did not hold training up: `communication` less `exposed`.
    bytes : int
        Of gradients in a step.
    copies : int
        Gradients that had to be copied into their buckets, in all steps.
    in_flight_high_water : int
        Most buckets under way at a time.
    overlap : str
        How communication goes on during backward: "none", "polls" or "thread".
    trials : mapping of str to float
        Measured seconds of a step for each, on the slowest rank; empty if nothing was tried (yet).
    """

    steps: int
    compute: float
    exposed: float
    communication: float
    hidden: float
    bytes: int
    copies: int
    in_flight_high_water: int
    overlap: str
    trials: Mapping[str, float] = field(default_factory=dict)


class Clock:
    """Takes the times of steps."""

    def __init__(self) -> None:
        self.steps, self.compute, self.exposed = 0, 0.0, 0.0
        self.communication, self.hidden = 0.0, 0.0
        self.last = 0.0  # seconds of the last step; 0 if its beginning was not seen
        self._began: float | None = None
        self._within = 0.0  # this step's share of backward that belongs to communication
        self._sync_began = 0.0

    def begin(self) -> None:
        """Note that a step begins, if it has not begun."""
        if self._began is None:
            self._began = perf_counter()

    def within(self, seconds: float) -> None:
        """Note that communication took so long within backward."""
        self._within += seconds

    def sync_begins(self) -> None:
        """Note that backward is over."""
        self._sync_began = perf_counter()

    def end(self, spans: Spans) -> None:
        """Note that a step has ended; what is in `spans` is read and removed."""
        now = perf_counter()
        began = self._sync_began if self._began is None else self._began
        exposed = now - self._sync_began + self._within
        communication = _covered(spans)
        spans.clear()
        self.steps += 1
        self.compute += self._sync_began - began - self._within
        self.exposed += exposed
        self.communication += communication
        self.hidden += max(communication - exposed, 0.0)
        self.last = 0.0 if self._began is None else now - began
        self._began, self._within = None, 0.0


def _covered(spans: Spans) -> float:
    """Give the time during which at least one span lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
