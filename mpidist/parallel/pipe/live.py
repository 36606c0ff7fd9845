"""How many microbatches are alive between their forward and the end of their backward."""

from __future__ import annotations

from typing import Any


class Live:
    """Counts what is alive, by objects and not by what the schedule says.

    Attributes
    ----------
    count, peak : int
        Activations of a chunk for a microbatch: now, and the most since :meth:`begin`.
    nbytes, peak_bytes : int
        The bytes that they keep, parameters not among them.
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


class Held:
    """What a forward keeps for the way back; stages derive theirs from it."""

    __slots__ = ("live", "size")

    live: Any
    size: int

    def __del__(self) -> None:
        live = getattr(self, "live", None)
        if live is not None:
            live.count -= 1
            live.nbytes -= self.size
