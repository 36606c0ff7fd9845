"""The time of a training step: computation, and communication exposed or hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from ..measure import counted, format_time, numbers_of, round_size
from ..trace import Recorder
from .transport import Spans


@dataclass(frozen=True)
class Stats:
    """Times of training steps on this rank, in seconds, means over all steps so far.

    A step lasts from its first forward to the end of ``sync_gradients()``.

    Attributes
    ----------
    steps : int
        Number of steps.
    compute : float
        Time of forward, loss and backward, without communication.
    exposed : float
        Time for which training waited: all of ``sync_gradients()``, and the calls that start and
        poll communication during backward.
    communication : float
        Time during which at least one bucket was pending, which includes waiting for slower ranks.
    hidden : float
        Communication that did not delay training: `communication` less `exposed`, at least 0 in
        each step.
    bytes : int
        Size in bytes of the gradients of a step, without sparse ones.
    copies : int
        Number of gradients that had to be copied into their buckets, in all steps.
    in_flight_high_water : int
        Largest number of buckets in flight at a time.
    overlap : str
        Transport of the buckets: "none", "polls" or "thread".
    trials : mapping of str to float
        Measured seconds of a step with each transport, on the slowest rank; empty until the
        transports were tried.
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

    def __str__(self) -> str:
        share = self.hidden / self.communication if self.communication else 0.0
        steps, buckets = counted(self.steps, "step"), counted(self.in_flight_high_water, "bucket")
        times = f"compute {format_time(self.compute)}, exposed {format_time(self.exposed)}"
        return (
            f"{steps}: {times}, communication {format_time(self.communication)} "
            f"({share:.0%} hidden), {round_size(self.bytes)} bytes in at most "
            f"{buckets} at a time, overlap {self.overlap}"
        )

    def scalars(self) -> dict[str, float]:
        """Return the attributes that are numbers, by name, for TensorBoard, W&B or a CSV file."""
        return numbers_of(self)


class Clock:
    """Measures the parts of each training step in seconds, and sums them over the steps."""

    def __init__(self) -> None:
        self.steps, self.compute, self.exposed = 0, 0.0, 0.0
        self.communication, self.hidden = 0.0, 0.0
        self.last = 0.0  # seconds of the last step; 0 if its begin was not noted
        self._began: float | None = None
        self._within = 0.0  # seconds of communication calls during this step's backward
        self._sync_began = 0.0

    def begin(self) -> None:
        """Record the beginning of a step, at its first forward."""
        if self._began is None:
            self._began = perf_counter()

    def within(self, seconds: float) -> None:
        """Record the seconds of a communication call during backward; they count as exposed."""
        self._within += seconds

    def sync_begins(self) -> None:
        """Record the end of backward, where ``sync_gradients()`` begins."""
        self._sync_began = perf_counter()

    def end(self, spans: Spans, recorder: Recorder | None = None) -> None:
        """Record the end of a step, and add the times of its parts to the sums.

        `spans` has the communication of each bucket, and is emptied.  A `recorder` records the
        computation and the ``sync_gradients()`` of the step as events of a trace.
        """
        # c: calls that start and poll communication; communication itself goes on between them::
        #
        #     forward  backward             sync_gradients()
        #     |--------|----c----c------c---|---------------|
        #     began                         sync_began      now
        #     compute                       exposed, and so are the c
        now = perf_counter()
        began = self._sync_began if self._began is None else self._began
        exposed = now - self._sync_began + self._within
        communication = _covered(spans)
        spans.clear()
        hidden = max(communication - exposed, 0.0)
        if recorder is not None:
            parts = {"exposed": exposed, "communication": communication, "hidden": hidden}
            facts = {f"{name}_us": round(1e6 * part, 1) for name, part in parts.items()}
            facts["step"] = self.steps
            recorder.add(("compute", "ddp", began, self._sync_began, "DDP", facts))
            recorder.add(("sync_gradients", "ddp", self._sync_began, now, "DDP", facts))
        self.steps += 1
        self.compute += self._sync_began - began - self._within
        self.exposed += exposed
        self.communication += communication
        self.hidden += hidden
        self.last = 0.0 if self._began is None else now - began
        self._began, self._within = None, 0.0


def _covered(spans: Spans) -> float:
    """Return the total seconds that lie within at least one of the spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
