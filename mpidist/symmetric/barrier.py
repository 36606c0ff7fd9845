"""How the ranks of a node meet: words in shared memory instead of messages."""

from __future__ import annotations

import platform
from threading import Lock

from ..plan import slot_of

WORDS = 8  # int64 per rank: one cache line, so that ranks do not write into each other's
_WEAKLY_ORDERED = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")
_NOTES = 1  # word 0 counts barriers, the others are notes of the operation under way


class Lines:
    """A cache line for each rank and each operation that may be under way at the same time.

    Parameters
    ----------
    words : writable memoryview of int64
        ``bytes_needed(size, slots)`` bytes that all ranks of the node see.
    rank, size : int
        Of the communicator.
    """

    def __init__(self, words: memoryview, rank: int, size: int):
        self.words, self.rank, self.size = words, rank, size
        slots = len(words) // (WORDS * size)
        self.counts = [0] * slots
        self.mine = [(slot * size + rank) * WORDS for slot in range(slots)]
        self.others = [
            tuple((slot * size + peer) * WORDS for peer in range(size) if peer != rank)
            for slot in range(slots)
        ]

    def behind(self) -> tuple[int, ...]:
        """Give the ranks that have not come to a barrier that this rank has come to."""
        return tuple(
            peer
            for peer in range(self.size)
            if any(
                self.words[(slot * self.size + peer) * WORDS] < count
                for slot, count in enumerate(self.counts)
            )
        )

    @staticmethod
    def bytes_needed(size: int, slots: int) -> int:
        """Give the length of the words in bytes."""
        return 8 * WORDS * size * slots

    def note(self, base: list[int], index: int, value: int) -> None:
        """Write a note for the others, who may read it after the next barrier."""
        self.words[self.mine[slot_of(base)] + _NOTES + index] = value

    def read(self, base: list[int], peer: int, index: int) -> int:
        """Read a note of `peer`."""
        return self.words[(slot_of(base) * self.size + peer) * WORDS + _NOTES + index]


class Barrier:
    """A round in which nothing moves: over when every rank has started it.

    One word per rank counts the barriers that it has come to.  It is a Transfer, so kernels are
    programs like all others.

    What a rank stored before it came is seen by every rank that has gone on.  Neither compiler nor
    interpreter moves numpy's stores past a call, and an aligned word is stored at once; what is
    left is the processor.  x86 keeps loads in order, and stores in order, but for stores past the
    cache, which a locked instruction drains.  Others (ARM) may swap any two unless a release is
    followed by an acquire: what comes before a release stays before it, what comes after an acquire
    stays after it, and the processor keeps the two in order.  There a lock is taken twice in a row,
    to end what came before and then to begin what comes after; taken once, both could slip into it
    and pass each other there.

    Parameters
    ----------
    lines : Lines
        The words.
    base : list of int
        The tags' base of the program: it tells the operations apart that are under way together.
    """

    __slots__ = ("_lines", "_base", "_count", "_others", "_lock")

    def __init__(self, lines: Lines, base: list[int]):
        self._lines, self._base = lines, base
        self._count, self._others, self._lock = 0, lines.others[0], Lock()

    def start(self) -> None:
        """Tell the others that this rank has come."""
        lines, slot = self._lines, slot_of(self._base)
        with self._lock:
            lines.counts[slot] += 1
        self._count, self._others = lines.counts[slot], lines.others[slot]
        if _WEAKLY_ORDERED:
            with self._lock:
                lines.words[lines.mine[slot]] = self._count
        else:
            lines.words[lines.mine[slot]] = self._count

    def test(self) -> bool:
        """Tell whether all have come."""
        words, count = self._lines.words, self._count
        for other in self._others:
            if words[other] < count:
                return False
        if _WEAKLY_ORDERED:
            with self._lock:
                pass
        with self._lock:
            return True
