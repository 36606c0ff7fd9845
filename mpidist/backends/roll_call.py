"""The roll call: ranks of other nodes, whose board we cannot see, are asked where they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from .board import HISTORY, Board

_LATER, _NOW, _ANSWER, _NOTICE = 1, 2, 3, 4  # when an answer is expected; what has gone wrong
NBYTES = 512
_WORDS = 2  # a rank's number of an operation, and its fingerprint
SECONDS = 0.3
_PAUSE = 0.005


class Word(NamedTuple):
    """What a rank of another node told."""

    sequence: int
    fingerprint: int
    text: str


class RollCall:
    """Questions, answers and notices over a communicator of their own.

    Parameters
    ----------
    comm : MPI.Comm
        Duplicated.
    absent : sequence of int
        Ranks that are not on this rank's board.
    board : Board
        Tells where this rank is.

    Attributes
    ----------
    absent : tuple of int
        Those ranks.
    """

    def __init__(self, comm: MPI.Comm, absent: Sequence[int], board: Board):
        self.comm, self.absent, self._board = comm.Dup(), tuple(absent), board
        self._rank = comm.Get_rank()
        right = (self._rank + 1) % comm.Get_size()
        self._neighbour = right if right in self.absent else None
        self._asked = 0
        self._open: list[tuple[int, Word]] = []  # questions about what this rank has not reached
        self._words: dict[int, Word] = {}  # the last that each rank told of an operation
        self._notices: dict[int, Word] = {}
        self._sent: list = []
        self._next = 0.0

    def answer(self, reached: dict[int, int] | None = None) -> None:
        """Answer what was asked; note in `reached` what was answered.  Looks every 5 ms."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PAUSE
        status, mine = MPI.Status(), self._board.reached(self._rank)
        while self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            source, tag = status.Get_source(), status.Get_tag()
            record = np.empty(NBYTES, np.uint8)
            self.comm.Recv(record, source, tag)
            word = _read(record)
            if tag == _NOTICE:
                self._notices[source] = word
            elif tag == _ANSWER:
                self._words[source] = word
                if reached is not None:
                    reached[source] = word.sequence
            elif tag == _NOW:
                self._send(source, _ANSWER, self._mine(mine))
            else:
                self._open.append((source, word))
        for source, word in [entry for entry in self._open if entry[1].sequence <= mine]:
            self._open.remove((source, word))
            if mine - word.sequence < HISTORY:
                self._words[source] = word
                self._send(source, _ANSWER, self._mine(word.sequence))
        self._sent = [entry for entry in self._sent if not entry[0].Test()]

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Ask, listen for 300 ms, and give the ranks that have not reached operation `sequence`."""
        reached: dict[int, int] = {}
        for rank in self.absent:
            self._send(rank, _NOW, self._mine(sequence))
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and len(reached) < len(self.absent):
            self.answer(reached)
            time.sleep(_PAUSE)
        return tuple(r for r in self.absent if reached.get(r, -1) < sequence)

    def ask(self, sequence: int) -> None:
        """Ask the next rank, once for each operation, which one it means.

        Around the ring of all ranks, if any two differ, then two neighbours do; those of one node
        see it on their board.
        """
        if self._neighbour is not None and self._asked != sequence:
            self._asked = sequence
            self._send(self._neighbour, _LATER, self._mine(sequence))

    def different(self, sequence: int, fingerprint: int) -> dict[int, str]:
        """Give the ranks that are known to mean another operation, and which."""
        self.answer()
        return {
            rank: word.text
            for rank, word in self._words.items()
            if word.sequence == sequence and word.fingerprint != fingerprint
        }

    def tell(self, sequence: int, fingerprint: int, text: str) -> None:
        """Tell the ranks of other nodes what this one means by an operation."""
        for rank in self.absent:
            self._send(rank, _ANSWER, Word(sequence, fingerprint, text))

    def notify(self, sequence: int, text: str) -> None:
        """Tell the ranks of other nodes why operation `sequence` will not end."""
        for rank in self.absent:
            self._send(rank, _NOTICE, Word(sequence, 0, text))

    def notices(self, sequence: int) -> dict[int, str]:
        """Give what other ranks told of why operation `sequence`, or one before, will not end."""
        return {r: word.text for r, word in self._notices.items() if word.sequence <= sequence}

    def _mine(self, sequence: int) -> Word:
        """Say what this rank means by an operation, one of the last."""
        fingerprint = self._board.fingerprint(sequence)
        return Word(sequence, fingerprint, self._board.texts.get(fingerprint, "another operation"))

    def _send(self, rank: int, tag: int, word: Word) -> None:
        record = np.zeros(NBYTES, np.uint8)
        record[: 8 * _WORDS].view(np.int64)[:] = word[:_WORDS]
        text = word.text.encode()[: NBYTES - 8 * _WORDS]
        record[8 * _WORDS : 8 * _WORDS + len(text)] = np.frombuffer(text, np.uint8)
        self._sent.append((self.comm.Isend(record, rank, tag), record))

    def close(self) -> None:
        """Free the communicator; collective."""
        self.comm.Free()


def _read(record: np.ndarray) -> Word:
    text = record[8 * _WORDS :].tobytes().rstrip(b"\0").decode(errors="ignore")
    sequence, fingerprint = record[: 8 * _WORDS].view(np.int64).tolist()
    return Word(sequence, fingerprint, text)
