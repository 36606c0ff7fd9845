"""Barriers of the ranks of a node, by counters in shared memory instead of messages.

Each rank has a cache line of eight 64-bit words in shared memory, which only it writes::

    word 0        number of barriers that the rank has reached
    words 1 … 7   notes of the rank for the current operation, such as the location of its array

There is a set of lines for blocking calls and one for each pending operation.  The kernels of
this package wait in these barriers.
"""

from __future__ import annotations

from collections.abc import Callable

from ..backends.board import STORES_KEEP_ORDER, Board, fence
from ..backends.waiting import spin
from .conditional import ConditionalAction

WORDS = 8  # int64 per rank: one cache line, so that ranks do not write into each other's
NO_PATIENCE = (0, 0)
_NOTES = 1  # index of the first note in a line; word 0 counts barriers


class BarrierLines:
    """Barrier counters and notes of the ranks: a cache line per rank and bank.

    Bank 0 is for blocking calls, each other one for a pending operation.  A rank's line has its
    counter of barriers and seven notes: words that it writes for the other ranks, such as where its
    array lies.

    `words` are ``bytes_needed(size, banks)`` bytes of memory that all ranks of the node share.
    `mine` has the index in them of this rank's counter, `others` those of the other ranks'
    counters, both by bank.  `patience` is that of a blocking call, see
    :func:`~mpidist.backends.waiting.spin`.
    """

    def __init__(self, words: memoryview, rank: int, size: int, patience: tuple[int, int]):
        self.words, self.rank, self.size, self.patience = words, rank, size, patience
        banks = len(words) // (WORDS * size)
        self.mine = [(bank * size + rank) * WORDS for bank in range(banks)]
        lower, higher = rank * WORDS, (size - 1 - rank) * WORDS  # words of the ranks on both sides
        self.others = [
            (*range(m - lower, m, WORDS), *range(m + WORDS, m + WORDS + higher, WORDS))
            for m in self.mine
        ]

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not reached a barrier at which this rank waits."""
        return tuple(
            peer
            for peer in range(self.size)
            if any(
                self.words[(bank * self.size + peer) * WORDS] < self.words[mine]
                for bank, mine in enumerate(self.mine)
            )
        )

    def arrive(self, bank: int) -> int:
        """Count a barrier that this rank has reached in `bank`; return the new count."""
        words, mine = self.words, self.mine[bank]
        if not STORES_KEEP_ORDER:
            fence()
        words[mine] = count = words[mine] + 1
        return count

    @staticmethod
    def bytes_needed(size: int, banks: int) -> int:
        """Return the length in bytes of the lines of `size` ranks in `banks` banks."""
        return 8 * WORDS * size * banks

    def note_index(self, bank: list[int], peer: int) -> int:
        """Return the index in `words` of the first note of `peer`, in the bank of a program's run.

        `peer` writes its notes before an arrival or barrier; the other ranks read them after it.
        """
        return (bank[0] * self.size + peer) * WORDS + _NOTES


AwaitedRanks = tuple[int, ...] | ConditionalAction | None
"""The ranks that a rank awaits in a barrier, or an action that returns them; None for all."""


class Barrier:
    """A transfer without messages that is complete when every awaited rank has started it.

    One word per rank counts the barriers that it has reached.  As a barrier has the methods of a
    :class:`~mpidist.backends.base.Transfer`, kernels are programs like all others.

    What a rank stored before a barrier is visible to every rank that has left the barrier. Neither
    compiler nor interpreter moves numpy's stores past a call, and an aligned word is stored at
    once, so only the processor could reorder them.  x86 keeps loads in order, and stores in order:
    those of a string instruction come before a later store (Intel SDM 3A, 8.2.4), and the C library
    ends copies with streaming stores by a fence.  Others (ARM) may swap any two, so there a fence
    comes between.

    `bank` is ``Program.bank`` of the kernel: one number, the bank of `lines` that the next run
    uses.  An action `awaits` returns the awaited ranks at each start, and may be skipped while
    there are none; by default all ranks are awaited.
    """

    __slots__ = ("lines", "awaits", "_bank", "_count", "_others", "_patience")

    def __init__(self, lines: BarrierLines, bank: list[int], awaits: AwaitedRanks = None):
        self.lines, self.awaits, self._bank = lines, awaits, bank
        self._count, self._others, self._patience = 0, lines.others[0], NO_PATIENCE

    def start(self) -> None:
        """Announce that this rank has reached the barrier."""
        lines, bank = self.lines, self._bank[0]
        self._patience = NO_PATIENCE if bank else lines.patience
        self._others = lines.others[bank] if self.awaits is None else self.awaited_words(bank)
        self._count = lines.arrive(bank)

    def awaited_words(self, bank: int) -> tuple[int, ...]:
        """Return the indices in ``lines.words`` of the awaited ranks' counters in bank `bank`."""
        awaits, size = self.awaits, self.lines.size
        if awaits is None:
            return self.lines.others[bank]
        ranks = awaits() if isinstance(awaits, ConditionalAction) else awaits
        return tuple([(bank * size + peer) * WORDS for peer in ranks])

    def test(self) -> bool:
        """Return whether all awaited ranks have reached the barrier.

        The first test in a blocking call (bank 0) spins briefly; between later ones, messages must
        make progress.
        """
        lines, count, patience = self.lines, self._count, self._patience
        self._patience = NO_PATIENCE
        if not spin(lines.words, self._others, count, patience):
            return False
        if not STORES_KEEP_ORDER:
            fence()
        return True


class BoardArrival:
    """A transfer without messages, complete when all ranks on the board have reached an operation.

    It is the first round of a program that reaches other ranks' memory in the background, or
    between messages.  Once all have arrived, ``check(sequence, operation, fingerprint)`` raises if
    their operations differ.
    """

    __slots__ = ("_board", "_check", "_named", "_bank", "_patience", "_now")

    def __init__(
        self,
        board: Board,
        check: Callable[[int, str, int], object],
        bank: list[int],
        patience: tuple[int, int],
    ):
        self._board, self._check, self._bank, self._patience = board, check, bank, patience
        self._now = NO_PATIENCE
        self._named = (0, "", 0)

    def name(self, sequence: int, what: str, fingerprint: int) -> None:
        """Set the operation that the next run serves: its sequence number, text and fingerprint."""
        self._named = (sequence, what, fingerprint)

    def start(self) -> None:
        """Begin to wait: the engine has announced this rank's operation already."""
        self._now = NO_PATIENCE if self._bank[0] else self._patience

    def test(self) -> bool:
        """Return whether all ranks have arrived; raise if their operations differ."""
        patience, self._now = self._now, NO_PATIENCE
        if not self._board.spin(self._named[0], patience):
            return False
        self._check(*self._named)
        return True
