"""What is told of operations: who has not come, who means another one, who has left."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from .backends.base import Backend
from .backends.board import fence
from .errors import CollectiveMismatch, CollectiveTimeout, RankFailed
from .shared import SharedMemory

_PRINTS = 4096  # kept in words; with the places of arrays, a long job has any number of them


class Reports:
    """Compares what the ranks announce on the arrival board, and words what goes wrong.

    Parameters
    ----------
    backend : Backend
        Whose board it is.
    shared : SharedMemory
        In which a rank may be behind.
    current : callable
        Gives the number of the last operation begun.
    """

    def __init__(self, backend: Backend, shared: SharedMemory, current: Callable[[], int]):
        self._backend, self._shared, self._current = backend, shared, current
        self._prints: dict[str, int] = {}

    def fingerprint(self, what: str) -> int:
        """Give the number that stands for an operation on the arrival board."""
        number = self._prints.get(what)
        if number is None:
            if len(self._prints) >= _PRINTS:
                self._prints.clear()
            number = self._prints[what] = zlib.crc32(what.encode())
        return number

    def alarm(self) -> None:
        """During a long wait: raise if a rank has left, or is in another operation."""
        sequence, board, rank = self._current(), self._backend.board, self._backend.rank
        left = board.left(sequence)
        if left:
            told = "; ".join(board.describe(r) for r in left)
            raise RankFailed(f"rank {rank}: collective #{sequence} waits in vain: {told}")
        gone = [r for r in self._behind() if board.has_left(r)]
        if gone:
            raise RankFailed(
                f"rank {rank}: collective #{sequence} waits in vain: rank "
                f"{', '.join(map(str, gone))} came to it and has left in the middle of it"
            )
        if sequence:
            what = self._doing(sequence)
            if what is not None:
                self.check_same(sequence, what)

    def _doing(self, sequence: int) -> str | None:
        """Give what this rank announced as operation number `sequence`, the last one."""
        announced = self._backend.board.fingerprint(sequence)
        return next((what for what, number in self._prints.items() if number == announced), None)

    def check_first(self, sequence: int, what: str) -> None:
        """Raise as :meth:`check_same` does, after the announcement and before the first message.

        Of two ranks that differ one sees the other, and sends nothing: Open MPI (5.0.11) writes
        past the end of the receiver's array if a message from the same node is longer.
        """
        fence()
        self.check_same(sequence, what)

    def check_same(self, sequence: int, what: str, harmless: bool = False) -> None:
        """Raise CollectiveMismatch if another rank is seen to mean another operation."""
        other = self._backend.board.different(sequence, self.fingerprint(what))
        if other:
            error = CollectiveMismatch(
                f"rank {self._backend.rank}: collective #{sequence} is {what} here and another "
                "on rank "
                f"{', '.join(map(str, other))}; MPIDIST_DEBUG=1 shows who called what where"
            )
            error.harmless = harmless
            raise error

    def timed_out(
        self, what: str, sequence: int | None, how: str, seconds: float | None
    ) -> CollectiveTimeout:
        """Make the report of a deadline that passed, `seconds` after its wait began."""
        board, rank = self._backend.board, self._backend.rank
        known = self._prints.get(what)  # the watchdog does not know what it watches
        other = board.different(sequence, known) if sequence is not None and known else ()
        missing = self._backend.missing(sequence) if sequence is not None else ()
        if missing:
            told = "; ".join(board.describe(r) for r in missing)
        elif other:
            told = f"rank {', '.join(map(str, other))} is in another operation"
        elif sequence is not None:
            told = f"all ranks have arrived: {self._inside()}"
        else:
            told = "the message has not come"
        within = f"{seconds} s" if seconds is not None else "its deadline"
        number = f" (collective #{sequence}, {how})" if sequence is not None else ""
        return CollectiveTimeout(
            f"rank {rank}: {what}{number} not finished within {within}: {told}",
            collective=what.split()[0],
            sequence=sequence,
            missing=missing,
        )

    def _behind(self) -> tuple[int, ...]:
        heap = self._shared.heap
        return heap.behind() if heap is not None else ()

    def _inside(self) -> str:
        """Say what is known about who hangs inside an operation."""
        behind = self._behind()
        known = list(self._backend.board.unwell())
        if behind:
            known.append(f"rank {', '.join(map(str, behind))} is behind in symmetric memory")
        return "; ".join(known) or "a message was lost, or a rank hangs inside the operation"
