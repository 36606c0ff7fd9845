"""How the ranks of a node meet: words in shared memory instead of messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..backends.board import STORES_KEEP_ORDER, Board, fence
from ..backends.waiting import spin

WORDS = 8  # int64 per rank: one cache line, so that ranks do not write into each other's
_NOTES = 1  # word 0 counts barriers, the others are notes of the operation under way


class Lines:
    """A cache line for each rank and each operation that may be under way at the same time.

    Parameters
    ----------
    words : writable memoryview of int64
        ``bytes_needed(size, slots)`` bytes that all ranks of the node see.
    rank, size : int
        Of the communicator.
    patience : tuple of int
        Of a blocking call, see :func:`~mpidist.backends.waiting.spin`.
    """

    def __init__(self, words: memoryview, rank: int, size: int, patience: tuple[int, int]):
        self.words, self.rank, self.size, self.patience = words, rank, size, patience
        slots = len(words) // (WORDS * size)
        self.mine = [(slot * size + rank) * WORDS for slot in range(slots)]
        lower, higher = rank * WORDS, (size - 1 - rank) * WORDS  # words of the ranks on both sides
        self.others = [
            (*range(m - lower, m, WORDS), *range(m + WORDS, m + WORDS + higher, WORDS))
            for m in self.mine
        ]

    def behind(self) -> tuple[int, ...]:
        """Give the ranks that have not come to a barrier that this rank has come to."""
        return tuple(
            peer
            for peer in range(self.size)
            if any(
                self.words[(slot * self.size + peer) * WORDS] < self.words[mine]
                for slot, mine in enumerate(self.mine)
            )
        )

    def come(self, slot: int) -> int:
        """Tell the others that this rank has come to its next barrier; give the number."""
        words, mine = self.words, self.mine[slot]
        if not STORES_KEEP_ORDER:
            fence()
        words[mine] = count = words[mine] + 1
        return count

    @staticmethod
    def bytes_needed(size: int, slots: int) -> int:
        """Give the length of the words in bytes."""
        return 8 * WORDS * size * slots

    def notes(self, base: list[int], peer: int) -> int:
        """Give the index of the first note of `peer`; what it writes there is for all to read.

        They may do so after the next barrier.
        """
        return (base[0] * self.size + peer) * WORDS + _NOTES


class Barrier:
    """A round in which nothing moves: over when every rank has started it.

    One word per rank counts the barriers that it has come to.  It is a Transfer, so kernels are
    programs like all others.

    What a rank stored before it came is seen by every rank that has gone on.  Neither compiler nor
    interpreter moves numpy's stores past a call, and an aligned word is stored at once; what is
    left is the processor.  x86 keeps loads in order, and stores in order: those of a string
    instruction come before a later store (Intel SDM 3A, 8.2.4), and the C library ends copies that
    go past the cache with a fence.  Others (ARM) may swap any two, so there a fence comes between.

    Parameters
    ----------
    lines : Lines
        The words.
    base : list of int
        The slot of the program: it tells the operations apart that are under way together.
    awaits : callable, optional
        Gives the ranks that this one waits for, at each start; by default all.
    """

    __slots__ = ("lines", "awaits", "_base", "_count", "_others")

    def __init__(
        self, lines: Lines, base: list[int], awaits: Callable[[], Sequence[int]] | None = None
    ):
        self.lines, self.awaits, self._base = lines, awaits, base
        self._count, self._others = 0, lines.others[0]

    def start(self) -> None:
        """Tell the others that this rank has come."""
        lines, slot = self.lines, self._base[0]
        self._others = lines.others[slot] if self.awaits is None else self.awaited(slot)
        self._count = lines.come(slot)

    def awaited(self, slot: int) -> tuple[int, ...]:
        """Give the words of the ranks that this one waits for now."""
        size = self.lines.size
        return tuple((slot * size + peer) * WORDS for peer in (self.awaits or tuple)())

    def test(self) -> bool:
        """Tell whether all have come; a blocking call looks for some microseconds."""
        lines, count = self.lines, self._count
        patience = (0, 0) if self._base[0] else lines.patience
        if not spin(lines.words, self._others, count, patience):
            return False
        if not STORES_KEEP_ORDER:
            fence()
        return True


class Arrival:
    """A round that is over when every rank has come to an operation, as the arrival board tells.

    Parameters
    ----------
    board : Board
        The arrival board.
    check : callable
        ``check(sequence, what, fingerprint)`` is called when all have come; it raises if they mean
        different operations.
    """

    __slots__ = ("_board", "_check", "_named")

    def __init__(self, board: Board, check: Callable[[int, str, int], object]):
        self._board, self._check = board, check
        self._named = (0, "", 0)

    def name(self, sequence: int, what: str, fingerprint: int) -> None:
        """Note the operation that the next run serves."""
        self._named = (sequence, what, fingerprint)

    def start(self) -> None:
        """Do nothing: this rank has been announced."""

    def test(self) -> bool:
        """Return whether all have come."""
        if not self._board.all_reached(self._named[0]):
            return False
        self._check(*self._named)
        return True
