"""The roll call: asks the ranks of other nodes which operations they have reached."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from mpi4py import MPI

from .base import Notice
from .board import HISTORY, Board
from .record import Record

# A question to be answered once its operation is reached, or at once; an answer; a failure.
_LATER, _NOW, _ANSWER, _NOTICE = 1, 2, 3, 4
NBYTES = 512
SECONDS = 0.3
_PAUSE = 0.005


class Word(NamedTuple):
    """A question, answer or notice about one operation.

    `text` describes the operation; in a notice it is the reason why the operation cannot complete,
    and the fingerprint is 0 if that is a mismatch, 2 + r if it is the loss of rank r.
    """

    sequence: int
    fingerprint: int
    text: str


class RollCall:
    """Asks ranks of other nodes, by messages, which operations they have reached.

    Nothing else uses `tag`.  `absent` are the ranks that are not on `board`, this node's.
    """

    def __init__(self, comm: MPI.Comm, tag: int, absent: Sequence[int], board: Board):
        self.comm, self._tag, self.absent, self._board = comm, tag, tuple(absent), board
        self._rank = comm.Get_rank()
        right = (self._rank + 1) % comm.Get_size()
        self._neighbour = right if right in self.absent else None
        self._asked = 0
        self._open: list[tuple[int, Word]] = []  # questions about operations not yet reached
        self._words: dict[int, Word] = {}  # the last answer of each rank
        self._notices: dict[int, Word] = {}
        self._sent: list = []
        self._next = 0.0

    def answer(self, reached: dict[int, int] | None = None) -> None:
        """Answer the questions that have arrived and take the answers, at most every 5 ms.

        The number of the operation in each answer is stored in `reached`, if given, by rank.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PAUSE
        status, mine = MPI.Status(), self._board.reached(self._rank)
        while self.comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
            source, record = status.Get_source(), _record()
            self.comm.Recv(record.data, source, self._tag)
            kind, sequence, fingerprint = record.numbers
            word = Word(sequence, fingerprint, record.text)
            if kind == _NOTICE:
                self._notices[source] = word
            elif kind == _ANSWER:
                self._words[source] = word
                if reached is not None:
                    reached[source] = word.sequence
            elif kind == _NOW:
                self._send(source, _ANSWER, self._mine(mine))
            else:
                self._open.append((source, word))
        for source, word in [entry for entry in self._open if entry[1].sequence <= mine]:
            self._open.remove((source, word))
            # Of an older one the board has no fingerprint any more.
            if mine - word.sequence < HISTORY:
                self._words[source] = word
                self._send(source, _ANSWER, self._mine(word.sequence))
        self._sent = [entry for entry in self._sent if not entry[0].Test()]

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Ask the ranks of other nodes; return those that have not reached operation `sequence`.

        A rank that does not answer within 300 ms counts as missing.
        """
        reached: dict[int, int] = {}
        for rank in self.absent:
            self._send(rank, _NOW, self._mine(sequence))
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and len(reached) < len(self.absent):
            self.answer(reached)
            time.sleep(_PAUSE)
        return tuple(r for r in self.absent if reached.get(r, -1) < sequence)

    def ask(self, sequence: int) -> None:
        """Ask rank + 1 (cyclic) for its operation number `sequence`, if it is on another node.

        It is asked once per operation and answers when it reaches the operation.  If any two ranks
        differ, then two neighbours in the ring of all ranks do; neighbours on one node compare on
        their board.
        """
        # Nodes {0, 1} and {2, 3, 4}: 1 asks 2, and 4 asks 0.
        if self._neighbour is not None and self._asked != sequence:
            self._asked = sequence
            self._send(self._neighbour, _LATER, self._mine(sequence))

    def mismatches(self, sequence: int, fingerprint: int) -> dict[int, str]:
        """Take new answers; return, by rank, the texts of operations unlike this rank's.

        They are of the ranks whose operation number `sequence` has another fingerprint than
        `fingerprint`, this rank's.
        """
        self.answer()
        return {
            rank: word.text
            for rank, word in self._words.items()
            if word.sequence == sequence and word.fingerprint != fingerprint
        }

    def tell(self, sequence: int, fingerprint: int, text: str) -> None:
        """Send the ranks of other nodes fingerprint and text of this rank's operation."""
        for rank in self.absent:
            self._send(rank, _ANSWER, Word(sequence, fingerprint, text))

    def notify(self, sequence: int, notice: Notice) -> None:
        """Send the ranks of other nodes the reason why operation `sequence` will not complete."""
        why = 0 if notice.mismatch else 1 if notice.lost is None else 2 + notice.lost
        for rank in self.absent:
            with suppress(MPI.Exception):  # this one may be lost, too
                self._send(rank, _NOTICE, Word(sequence, why, notice.text))

    def notices(self, sequence: int) -> dict[int, Notice]:
        """Return, by rank, the received reasons why an operation cannot complete."""
        return {
            rank: Notice(word.text, word.fingerprint == 0, lost if lost >= 0 else None)
            for rank, word in self._notices.items()
            for lost in (word.fingerprint - 2,)
            if word.sequence <= sequence
        }

    def _mine(self, sequence: int) -> Word:
        """Return the Word on this rank's operation `sequence`, one of its last `HISTORY` (4)."""
        fingerprint = self._board.fingerprint(sequence)
        return Word(sequence, fingerprint, self._board.texts.get(fingerprint, "another operation"))

    def _send(self, rank: int, kind: int, word: Word) -> None:
        record = _record()
        for n, number in enumerate((kind, word.sequence, word.fingerprint)):
            record.numbers[n] = number
        record.text = word.text
        self._sent.append((self.comm.Isend(record.data, rank, self._tag), record))


def _record() -> Record:
    """Return memory for a message: which of the four it is, an operation's number, fingerprint."""
    return Record(3, NBYTES)
