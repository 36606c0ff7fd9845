"""Error reports of operations: missing ranks, mismatched calls, ranks that have left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..backends.base import Backend, Notice
from ..backends.board import HISTORY, fence
from ..backends.flight import fingerprint_of
from ..backends.greeting import late_greetings_of
from ..backends.liveness import failed
from ..errors import CollectiveMismatch, CollectiveTimeout, CommunicatorBroken, RankFailed
from ..measure import plural

_PRINTS = 4096  # kept texts; they contain offsets of arrays, so their number is unbounded
_PATIENT = 2  # alarms (see ALARM_SECONDS) in which a mismatch waits for ranks that are late: 0.6 s


class Reports:
    """Compares the ranks' announcements on the arrival board and writes the error reports.

    ``behind()`` returns the ranks that have not reached a barrier in symmetric memory,
    ``current()`` the number of the last operation begun.
    """

    def __init__(
        self, backend: Backend, behind: Callable[[], tuple[int, ...]], current: Callable[[], int]
    ):
        self._backend, self._behind, self._current = backend, behind, current
        self._roll_call = backend.roll_call
        self._prints: dict[tuple[str, bool], int] = {}
        self._alarms = 0, 0  # number of an operation, and how often its wait was long

    def fingerprint(self, operation: str, meets: bool = True) -> int:
        """Return the number that identifies an operation, by its description, on the arrival board.

        It is odd if the operation `meets`: all ranks arrive before any work.
        """
        number = self._prints.get((operation, meets))
        if number is None:
            if len(self._prints) >= _PRINTS:
                self._prints.clear()
                self._backend.board.texts.clear()
            number = self._prints[operation, meets] = fingerprint_of(operation, meets)
            self._backend.board.texts[number] = operation
            if self._backend.track is not None:
                self._backend.track.describe(number, operation)
        return number

    def alarm(self) -> None:
        """Raise, during a long wait, if a rank has left or runs a different operation."""
        sequence, board, rank = self._current(), self._backend.board, self._backend.rank
        left = board.left(sequence)
        if left:
            reason = "; ".join(board.describe(r) for r in left)
            text = f"rank {rank}: collective #{sequence} cannot complete: {reason}"
            raise RankFailed(text, ranks=left)
        gone = [r for r in self._behind() if board.has_left(r)]
        if gone:
            raise RankFailed(
                f"rank {rank}: collective #{sequence} cannot complete: rank "
                f"{', '.join(map(str, gone))} has left in the middle of the operation",
                ranks=gone,
            )
        operation = board.texts.get(board.fingerprint(sequence))
        if sequence and operation is not None:
            self._check_given_up(sequence, operation, board.never_begun(sequence))
            if not self._all_may_come(sequence):
                self.check_same(sequence, operation, board.fingerprint(sequence))
            self._check_elsewhere(sequence, operation)

    def _all_may_come(self, sequence: int) -> bool:
        """Return whether ranks that differ are given time until all have come.

        Those that wait for all first (their fingerprints are odd) raise alike then, and the
        communicator stays usable: see :meth:`check_arrived`.
        """
        board, (alarmed, count) = self._backend.board, self._alarms
        self._alarms = sequence, count + 1 if alarmed == sequence else 1
        mine = board.fingerprint(sequence)
        ranks = (self._backend.rank, *board.different(sequence, mine))
        return self._alarms[1] <= _PATIENT and all(
            board.fingerprint(sequence, r) % 2 for r in ranks
        )

    def _check_elsewhere(self, sequence: int, operation: str) -> None:
        """Raise if ranks of other nodes report a different operation, or a failure.

        Once for each operation it asks one rank, the next in the ring of all ranks, if that is on
        another node.  It does not wait: the answers that have arrived so far count.
        """
        roll_call = self._roll_call
        if roll_call is None:
            return
        late_greetings_of(self._backend).look()
        roll_call.ask(sequence)
        for rank, notice in roll_call.notices(sequence).items():
            text = (
                f"rank {self._backend.rank}: {operation} (collective #{sequence}) cannot complete: "
                f"rank {rank} reports: {notice.text}"
            )
            if notice.lost is not None:
                raise RankFailed(text, ranks=(notice.lost,))
            raise (CollectiveMismatch if notice.mismatch else CommunicatorBroken)(text)
        other = roll_call.mismatches(sequence, self._backend.board.fingerprint(sequence))
        if other:
            raise self.mismatch(sequence, operation, other)

    def mismatch(self, sequence: int, operation: str, other: dict[int, str]) -> CollectiveMismatch:
        """Return the error for ranks that run a different operation.

        `other` has a description of it by rank; it is empty if the ranks are not known.
        """
        others = ", ".join(f"{text} on rank {rank}" for rank, text in other.items())
        others = others or "a different one on another node"
        return CollectiveMismatch(
            f"rank {self._backend.rank}: collective #{sequence} is {operation} here and {others}; "
            "MPIDIST_DEBUG=1 shows each rank's call site"
        )

    def notify(self, sequence: int | None, error: BaseException, elsewhere: bool = True) -> None:
        """Notify other ranks that an operation, or all later ones, will not complete.

        After a passed deadline the board tells the ranks of this node that arrive later: they would
        hang in a native call.  After a mismatch a message tells the ranks of other nodes; those of
        this node find it by their own comparison.  Where a message or a queued call failed, which
        has no number (None), both tell that this rank begins no further operation.  After the loss
        of a rank a message tells those of other nodes which one it is.

        `elsewhere` is whether MPI may be called, to tell other nodes.
        """
        mismatch = isinstance(error, CollectiveMismatch)
        later = sequence is None
        if sequence is None:
            sequence = self._current() + 1
            self._backend.board.give_up(sequence)
        elif isinstance(error, CollectiveTimeout) and error.sequence is not None:
            self._backend.board.give_up(error.sequence)
        lost = error.ranks[0] if isinstance(error, RankFailed) and error.ranks else None
        if self._roll_call is not None and elsewhere and (mismatch or later or lost is not None):
            self._roll_call.notify(sequence, Notice(str(error), mismatch, lost))

    def check_first(self, sequence: int, operation: str, fingerprint: int) -> None:
        """Raise CollectiveMismatch before the first message, if a rank announced another call.

        At least one of two mismatched ranks sees the other's announcement, and sends nothing: Open
        MPI (5.0.11) writes past the end of the receiver's array if a message from the same node is
        longer.  Raises CommunicatorBroken if a rank has given up the operation at its deadline.
        """
        # On x86 too: it may read the others' words before its own announcement is visible to them.
        #     rank 0   announce A | fence | read rank 1's word      One of the two reads comes after
        #     rank 1   announce B | fence | read rank 0's word      the other's announcement.
        fence()
        other = self._backend.board.different(sequence, fingerprint)
        if other:
            self._check_given_up(sequence, operation, other)
            self.check_same(sequence, operation, fingerprint)

    def check_same(self, sequence: int, operation: str, fingerprint: int) -> None:
        """Raise CollectiveMismatch if a rank of this node has announced a different operation."""
        board = self._backend.board
        other = board.different(sequence, fingerprint)
        unlike = set(other) - set(board.given_up(sequence, other)) if other else ()
        if unlike:
            raise self.mismatch(
                sequence, operation, dict.fromkeys(sorted(unlike), "a different one")
            )

    def _check_given_up(self, sequence: int, operation: str, ranks: Sequence[int]) -> None:
        """Raise CommunicatorBroken if one of `ranks` gave the operation up, or never begins it."""
        given_up = self._backend.board.given_up(sequence, ranks)
        if given_up and (lost := self._backend.lost()):
            raise failed(self._backend.rank, lost)  # which they have left for
        if given_up:
            raise CommunicatorBroken(
                f"rank {self._backend.rank}: {operation} (collective #{sequence}) cannot complete: "
                f"{self._given_up(sequence, given_up)}, so the communicator is broken"
            )

    def check_arrived(
        self, sequence: int, operation: str, everyone: Callable[[str], list[str]]
    ) -> None:
        """Raise CollectiveMismatch if the ranks, all arrived, have announced different operations.

        Or CommunicatorBroken, if a rank has given up the operation, and will not take part in it.

        If each of the operations waits for all ranks first, no work was done and every rank sees
        the mismatch: the ranks exchange the descriptions, by ``everyone(operation)``, and the
        communicator stays usable.
        """
        board = self._backend.board
        fingerprint = board.fingerprint(sequence)
        other = board.different(sequence, fingerprint)
        alike = self._backend.alike
        if self._roll_call is not None:
            late_greetings_of(self._backend).look()
        if alike and not other:
            return
        self._check_given_up(sequence, operation, other)
        # An even one is of a rank that did not wait for the others, and may be at work already.
        if not all(board.fingerprint(sequence, rank) % 2 for rank in other):
            self.check_same(sequence, operation, fingerprint)
        texts = dict(enumerate(everyone(operation)))
        error = self.mismatch(
            sequence, operation, {r: t for r, t in texts.items() if t != operation}
        )
        error.harmless = True
        raise error

    def timed_out(
        self,
        operation: str,
        sequence: int | None,
        how: str,
        seconds: float | None,
        ask: bool = True,
    ) -> CollectiveTimeout:
        """Return the error to raise for an operation not finished within `seconds`.

        `sequence` is its number (None for one without, such as a message); `how` names its executor
        or algorithm, or what it waits for.  With `ask`, other nodes are asked for their state; else
        only the board is read, without MPI.
        """
        board, rank = self._backend.board, self._backend.rank
        missing: tuple[int, ...] = ()
        other: tuple[int, ...] = ()
        given_up: tuple[int, ...] = ()
        if sequence is not None:
            missing = self._backend.missing(sequence) if ask else board.missing(sequence)
            if board.reached(rank) - sequence < HISTORY:  # else its own fingerprint is gone
                other = board.different(sequence, board.fingerprint(sequence))
                given_up = board.given_up(sequence, other)
        if missing:
            reason = "; ".join(board.describe(r) for r in missing)
        elif len(other) > len(given_up):
            unlike = sorted(set(other) - set(given_up))
            reason = f"rank {', '.join(map(str, unlike))} is in another operation"
        elif sequence is not None:
            reason = f"all ranks have arrived: {self._inside(sequence, given_up)}"
        else:
            reason = "the message has not arrived"
        within = f"{seconds} s" if seconds is not None else "its deadline"
        number = f" (collective #{sequence}, {how})" if sequence is not None else ""
        return CollectiveTimeout(
            f"rank {rank}: {operation}{number} not finished within {within}: {reason}",
            collective=operation.split()[0],
            sequence=sequence,
            missing=missing,
        )

    def _inside(self, sequence: int, given_up: Sequence[int]) -> str:
        """Return why ranks hang inside an operation; the deadline of the `given_up` has passed."""
        behind = self._behind()
        reasons = list(self._backend.board.stopped_or_dead())
        if behind:
            late = ", ".join(map(str, behind))
            reasons.append(f"rank {late} has not reached a barrier inside the operation")
        if not reasons:
            reasons.append("a message was lost, or a rank hangs inside the operation")
        if given_up:  # which does not say why
            reasons.append(self._given_up(sequence, given_up))
        return "; ".join(reasons)

    def _given_up(self, sequence: int, ranks: Sequence[int]) -> str:
        """Return the clauses of a report that name the ranks that gave up an operation."""
        before = self._backend.board.never_begun(sequence)
        during = [rank for rank in ranks if rank not in before]
        clauses = []
        for some, what in ((during, "timed out in"), (before, "failed before")):
            if some:
                verb, named = "has" if len(some) == 1 else "have", ", ".join(map(str, some))
                clauses.append(f"{plural(len(some), 'rank')} {named} {verb} {what} this operation")
        return " and ".join(clauses)
