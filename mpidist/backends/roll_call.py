"""The roll call: ranks of other nodes, whose board we cannot see, are asked where they are."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

_QUESTION, _ANSWER = 1, 2
SECONDS = 0.3
_PAUSE = 0.005


class RollCall:
    """Questions and answers over a communicator of their own.

    Parameters
    ----------
    comm : MPI.Comm
        Duplicated.
    absent : sequence of int
        Ranks that are not on this rank's board.
    """

    def __init__(self, comm: MPI.Comm, absent: Sequence[int]):
        self._comm, self._absent = comm.Dup(), tuple(absent)
        self._sent: list = []
        self._next = 0.0

    def answer(self, sequence: int, answers: dict[int, int] | None = None) -> None:
        """Answer what was asked; note answers that came.  Cheap: looks every 5 ms."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PAUSE
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            source, tag = status.Get_source(), status.Get_tag()
            number = np.empty(1, np.int64)
            self._comm.Recv(number, source, tag)
            if tag == _QUESTION:
                self._send(source, sequence, _ANSWER)
            elif answers is not None:
                answers[source] = int(number[0])

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Ask, listen for 300 ms, and give the ranks that have not reached operation `sequence`."""
        answers: dict[int, int] = {}
        for rank in self._absent:
            self._send(rank, sequence, _QUESTION)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and len(answers) < len(self._absent):
            self.answer(sequence, answers)
            time.sleep(_PAUSE)
        return tuple(r for r in self._absent if answers.get(r, -1) < sequence)

    def _send(self, rank: int, sequence: int, tag: int) -> None:
        number = np.array([sequence], np.int64)
        self._sent.append((self._comm.Isend(number, rank, tag), number))

    def close(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()
