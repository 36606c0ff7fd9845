"""The state of the machine that is measured: how far apart its cores are, and who else uses them.

A virtual machine's cores may be hyperthreads of one core now, and share no cache a minute later.
Then the round trip of a cache line between ranks 0 and 1 changes by a factor of 3 to 6, and with it
the times of most calls.  So it is measured before, between and after, in a millisecond.
"""

from __future__ import annotations

from typing import Any

from ..communicator.communicator import Communicator
from ..communicator.layers import round_trip
from .results import Results, busy_cores, load_text

CHANGED = 1.6  # ratio of two round trips from which the machine counts as another one


class Watch:
    """Looks at the round trip of a cache line during a measurement.

    Parameters
    ----------
    comm : Communicator
        The ranks that measure.

    Attributes
    ----------
    looks : list of float or None
        Nanoseconds of the round trip, the same on all ranks; None where it could not be measured
        (see :func:`mpidist.communicator.layers.round_trip`).
    busy : list of (str, int, float)
        What :func:`~mpidist.bench.results.busy_cores` found at :meth:`begin` and :meth:`again`.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.looks: list[float | None] = []
        self.busy: list[tuple[str, int, float]] = []

    def begin(self) -> Watch:
        """Look for other processes and at the round trip, before a command measures; collective."""
        self.busy = busy_cores(self.comm)
        self.look()
        return self

    def look(self) -> None:
        """Measure the round trip now; collective."""
        seconds = round_trip(self.comm)
        self.looks.append(None if seconds is None else 1e9 * seconds)

    @property
    def changed(self) -> bool:
        """Whether two of the round trips differ by more than a factor of 1.6."""
        known = [ns for ns in self.looks if ns is not None]
        return len(known) > 1 and max(known) > CHANGED * min(known)

    def figures(self) -> dict[str, Any]:
        """Return the figures of a row: least and largest round trip, and ``changed`` if it did."""
        known = [ns for ns in self.looks if ns is not None]
        if not known:
            return {}
        found = {"line_ns": min(known), "line_most_ns": max(known)}
        return {**found, "changed": True} if self.changed else found

    def again(self) -> list[str]:
        """Look for other processes and at the round trip again, after a measurement; collective.

        Return what speaks against the figures that were measured meanwhile.
        """
        self.look()
        self.busy = self.busy or busy_cores(self.comm)
        doubts = [load_text(*node) for node in self.busy]
        return [*doubts, *[self.described()] * self.changed]

    def end(self, results: Results) -> None:
        """Look for the last time; add what was found to header and notes of results; collective."""
        self.look()
        if self.busy:
            results.header["busy"] = self.busy
        if text := self.described():
            results.header["line_ns"] = self.before_and_after()
            results.notes.append(text)

    def before_and_after(self) -> dict[str, float | None]:
        """Return the first and the last round trip in nanoseconds."""
        return {"before": self.looks[0], "after": self.looks[-1]}

    def described(self) -> str:
        """Return a sentence on the first and the last round trip; empty if neither is known."""
        known = [f"{ns:.0f} ns {w}" for w, ns in self.before_and_after().items() if ns is not None]
        if not known:
            return ""
        text = f"round trip of a cache line between ranks 0 and 1: {', '.join(known)}"
        return f"{text}: the machine has changed meanwhile" if self.changed else text
