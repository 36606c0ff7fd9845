"""How many microbatches are alive between their forward and the end of their backward."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class Live:
    """Counts what is alive, by objects and not by what the schedule says.

    Attributes
    ----------
    count, peak : int
        Activations of a chunk for a microbatch: now, and the most since :meth:`begin`.
    nbytes, peak_bytes : int
        The bytes that they keep for the way back, see :class:`~mpidist.PipelineStats`.
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

    def resize(self, nbytes: int) -> None:
        """Take down that it keeps more or fewer bytes than before, if it is counted."""
        live = getattr(self, "live", None)
        if live is not None:
            live.nbytes += nbytes - self.size
            live.peak_bytes = max(live.peak_bytes, live.nbytes)
            self.size = nbytes

    def __del__(self) -> None:
        live = getattr(self, "live", None)
        if live is not None:
            live.count -= 1
            live.nbytes -= self.size


class Size:
    """The bytes that a microbatch keeps; None where nobody has counted yet.

    Attributes
    ----------
    whole : int or None
        After forward.
    halfway : int or None
        After the first half of backward.
    """

    __slots__ = ("whole", "halfway")

    def __init__(self) -> None:
        self.whole: int | None = None
        self.halfway: int | None = None


class Sizes:
    """Sizes of microbatches, one for all that are made alike."""

    LIMIT = 256  # batches of ever new shapes must not fill the memory

    def __init__(self) -> None:
        self._found: dict[Hashable, Size] = {}

    def __len__(self) -> int:
        return len(self._found)

    def of(self, key: Hashable) -> Size:
        """Give the one of microbatches like this."""
        size = self._found.get(key)
        if size is None:
            if len(self._found) >= self.LIMIT:
                self._found.clear()
            size = self._found[key] = Size()
        return size
