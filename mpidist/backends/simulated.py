"""The simulated backend: each rank is a thread of one process, with faults on demand.

It serves users' own tests: no MPI is needed, a deadlock is detected at once instead of at a
deadline, messages can be delayed or dropped, and ranks killed.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arguments import whole
from ..errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorBroken,
    DeadlockError,
    InvalidArgument,
    RankFailed,
    wrong_length,
)
from .base import AllOf, Backend, Request
from .board import Board, private_words
from .waiting import Condition, Progress

_NOTHING = np.empty(0, np.uint8)
_SENT = AllOf(())  # complete at once, as the receiver's mailbox has a copy


@dataclass(frozen=True)
class Faults:
    """Faults of a simulated group: delayed and lost messages, killed ranks.

    Parameters
    ----------
    delay : callable, optional
        ``delay(source, target, number)`` returns the seconds by which that message is late;
        `number` counts the messages from source to target from 0.
    drop : callable, optional
        ``drop(source, target, number)`` returns whether that message is lost.
    kill : dict of int to int
        Number of messages after which a rank dies, by rank: its next send raises `RankFailed`.
    """

    delay: Callable[[int, int, int], float] | None = None
    drop: Callable[[int, int, int], bool] | None = None
    kill: dict[int, int] = field(default_factory=dict)


class _Group:
    """The state that the ranks of one group share: mailboxes, waiting ranks, ended ranks."""

    def __init__(self, size: int, faults: Faults, nodes: Sequence[object]):
        self.size, self.faults, self.nodes = size, faults, tuple(nodes)
        self.condition = threading.Condition()
        self.boxes: dict[tuple[int, int, int], deque] = defaultdict(deque)
        self.version = [0] * size  # by rank: counts what may end its wait
        self.numbers: dict[tuple[int, int], int] = defaultdict(int)
        self.waiting: set[int] = set()
        self.gone: dict[int, str] = {}
        self.words = private_words(size)
        self.splits: dict[int, list] = defaultdict(list)
        self.created: dict[tuple[int, object], _Group] = {}
        self.pending: dict[tuple[int, int, int], deque[_Pending]] = defaultdict(deque)
        self.late = 0  # messages that are delayed or lost

    def deliver(self, key: tuple[int, int, int], payload: bytes, late: bool = False) -> _Pending:
        """Put a message into the mailbox `key`, or, if it must wait, among the pending ones.

        It waits if it is `late`, or behind a late one.  `key` is (source, target, tag).
        """
        message = _Pending(payload, late)
        with self.condition:
            self.pending[key].append(message)
            self.late += late
            self._arrive(key)
        return message

    def wake_all(self) -> None:
        """Wake all waiting ranks, after a change that is not a message."""
        self.version = [v + 1 for v in self.version]
        self.waiting.clear()  # until each has tested again: else this might look like a deadlock
        self.condition.notify_all()

    def arrive(self, key: tuple[int, int, int], message: _Pending) -> None:
        """End a message's delay: put it into the mailbox `key`, or behind an earlier late one.

        `key` is (source, target, tag).  Messages that waited only for this one follow it.
        """
        with self.condition:
            message.late = False
            self.late -= 1
            self._arrive(key)

    def _arrive(self, key: tuple[int, int, int]) -> None:
        pending = self.pending[key]
        while pending and not pending[0].late:
            self.boxes[key].append(pending.popleft().payload)
        self.version[key[1]] += 1
        self.waiting.discard(key[1])
        self.condition.notify_all()


@dataclass(slots=True)
class _Pending:
    """A message not in its mailbox yet; a lost one is late for ever and delays those behind it."""

    payload: bytes
    late: bool


class SimulatedRequest:
    """The pending receive of a message of a simulated group."""

    __slots__ = ("_group", "_key", "_data", "_done", "_queue", "_error")

    def __init__(self, group: _Group, key: tuple[int, int, int], data: np.ndarray, queue: deque):
        self._group, self._key, self._data = group, key, data
        self._queue, self._done = queue, False
        self._error: CollectiveMismatch | None = None
        queue.append(self)

    def test(self) -> bool:
        """Receive the message if it has arrived; return whether it has.

        Receives are served in the order in which they were posted.  Raises CollectiveMismatch if
        the message has not the length of the array.
        """
        while not self._done and self._queue:
            with self._group.condition:
                box = self._group.boxes[self._key]
                payload = box.popleft() if box else None
            if payload is None:
                return False
            self._queue.popleft()._take(payload)
        if self._error is not None:
            raise self._error
        return self._done

    def _take(self, payload: bytes) -> None:
        """Copy a message into the array; after a wrong length, only this request's test raises."""
        self._done = True
        if len(payload) != self._data.nbytes:
            source, target, _ = self._key
            self._error = wrong_length(target, self._data.nbytes, source, len(payload))
            return
        self._data.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)


class SimulatedShortRequest(SimulatedRequest):
    """The pending receive of a short message of any length."""

    __slots__ = ("content",)

    def _take(self, payload: bytes) -> None:
        self._done = True
        self.content = payload

    def release(self) -> None:
        """Do nothing: each message has memory of its own."""


class SimulatedAnyShortRequest:
    """The pending receive of a short message from any rank."""

    __slots__ = ("_backend", "_tag", "_done", "source", "content")

    def __init__(self, backend: SimulatedBackend, tag: int):
        self._backend, self._tag, self._done = backend, tag, False

    def test(self) -> bool:
        """Receive a message that no other receive waits for, if any; return whether it has one."""
        found = None if self._done else self._backend.take_any(self._tag)
        if found is not None:
            self.source, self.content = found
            self._done = True
        return self._done

    def release(self) -> None:
        """Do nothing: each message has memory of its own."""


class SimulatedBackend(Backend):
    """One rank of a simulated group of threads; :meth:`create_group` creates a group."""

    name = library = "simulated"
    tag_limit = 2**31
    threads = True

    def __init__(self, group: _Group, rank: int):
        self._group = group
        self.rank, self.size = rank, group.size
        self.hosts: Sequence[object] = group.nodes
        self.board = Board(group.words, rank, range(group.size))
        self._posted: dict[tuple[int, int, int], deque] = defaultdict(deque)
        self._splits = 0
        self._groups: dict[tuple[int, ...], int] = defaultdict(int)  # made, by members
        self._sent = 0
        self._parts: list[SimulatedBackend] = []  # this rank in the groups split off

    @classmethod
    def create_group(
        cls, size: int, faults: Faults | None = None, nodes: Sequence[object] | None = None
    ) -> list[SimulatedBackend]:
        """Create a group of `size` ranks; return its backends, by rank.

        Parameters
        ----------
        size : int
            Number of ranks, ≥ 1.
        faults : Faults, optional
            Faults of the group; by default none.
        nodes : sequence, optional
            A key per rank; ranks with equal keys share a node.  By default all do.
        """
        whole("size", size)
        if nodes is not None and len(nodes) != size:
            raise InvalidArgument(
                f"nodes={nodes!r}: expected one key for each of the {size} ranks, not {len(nodes)}"
            )
        group = _Group(size, faults or Faults(), nodes if nodes is not None else (0,) * size)
        return [cls(group, rank) for rank in range(size)]

    def isend(self, data: np.ndarray, peer: int, tag: int) -> Request:
        """Put a copy of the data into the mailbox of `peer`."""
        return self._send(data.tobytes(), peer, tag)

    def isend_short(self, content: bytes, peer: int, tag: int) -> Request:
        """Put a short message into the mailbox of `peer`."""
        return self._send(content, peer, tag)

    def _send(self, payload: bytes, peer: int, tag: int) -> Request:
        group, faults = self._group, self._group.faults
        if faults.kill.get(self.rank, self._sent + 1) <= self._sent:
            self.leave(f"killed after {self._sent} messages")
            raise RankFailed(f"rank {self.rank} was killed after {self._sent} messages")
        self._sent += 1
        key = (self.rank, peer, tag)
        number = group.numbers[self.rank, peer]
        group.numbers[self.rank, peer] += 1
        lost = bool(faults.drop and faults.drop(self.rank, peer, number))
        seconds = faults.delay(self.rank, peer, number) if faults.delay else 0
        message = group.deliver(key, payload, lost or seconds > 0)
        if message.late and not lost:
            timer = threading.Timer(seconds, group.arrive, (key, message))
            timer.daemon = True
            timer.start()
        return _SENT

    def irecv(self, data: np.ndarray, peer: int, tag: int) -> SimulatedRequest:
        """Post the receive of a message of exactly the length of `data` into `data`."""
        key = (peer, self.rank, tag)
        return SimulatedRequest(self._group, key, data, self._posted[key])

    def irecv_short(self, peer: int, tag: int) -> SimulatedShortRequest:
        """Post the receive of a short message."""
        key = (peer, self.rank, tag)
        return SimulatedShortRequest(self._group, key, _NOTHING, self._posted[key])

    def irecv_short_any(self, tag: int) -> SimulatedAnyShortRequest:
        """Post the receive of a short message from any rank."""
        return SimulatedAnyShortRequest(self, tag)

    def iprobe(self, peer: int | None, tag: int) -> int | None:
        """Return the sender of a message that no posted receive waits for, or None."""
        peers = range(self.size) if peer is None else (peer,)
        with self._group.condition:
            for source in peers:
                key = (source, self.rank, tag)
                box = self._group.boxes.get(key, ())
                if len(box) > len(self._posted.get(key, ())):
                    return source
        return None

    def take_any(self, tag: int) -> tuple[int, bytes] | None:
        """Receive a message that no posted receive waits for; return (sender, bytes), or None."""
        source = self.iprobe(None, tag)
        if source is None:
            return None
        key = (source, self.rank, tag)
        for posted in tuple(self._posted[key]):  # earlier receives get the earlier messages
            posted.test()
        with self._group.condition:
            return source, self._group.boxes[key].popleft()

    def subgroup(self, ranks: Sequence[int], tag: int) -> SimulatedBackend:
        """Return a backend over `ranks`, in that order; only these call it.  `tag` is not used."""
        members = tuple(ranks)
        self._groups[members] += 1
        return self._over(members, (self._groups[members], members))

    def _over(self, members: Sequence[int], key: tuple[int, object]) -> SimulatedBackend:
        """Return a backend over `members`; the first of them to come makes the group of `key`."""
        group = self._group
        with group.condition:
            sub = group.created.get(key)
            if sub is None:
                nodes = [group.nodes[r] for r in members]
                sub = group.created[key] = _Group(len(members), group.faults, nodes)
        self._parts.append(SimulatedBackend(sub, members.index(self.rank)))
        return self._parts[-1]

    def wait(self, test: Condition, deadline: float | None, progress: Progress = None) -> bool:
        """Wait until ``test()`` is true; return False if `deadline` passed first.

        If every rank waits or has ended, and no message is pending, it raises DeadlockError, or
        RankFailed if one of them has ended by a failure.
        """
        group, rank = self._group, self.rank
        while True:
            seen = group.version[rank]
            if test():
                return True
            if progress is not None:
                progress()
            with group.condition:
                # What came since the test has notified this rank already, in vain: test again.
                if group.version[rank] != seen:
                    continue
                group.waiting.add(rank)
                if len(group.waiting) + len(group.gone) >= self.size and not group.late:
                    self._raise_deadlock()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    group.waiting.discard(rank)
                    return False
                group.condition.wait(left if left is not None and left < 0.1 else 0.1)
                group.waiting.discard(rank)

    def _raise_deadlock(self) -> None:
        """Raise RankFailed if a rank has ended by a failure, else DeadlockError."""
        group = self._group
        waits = ", ".join(map(str, sorted(group.waiting)))
        group.waiting.discard(self.rank)  # the user may catch the error and continue
        failed = {r: why for r, why in group.gone.items() if why != "finished"}
        if failed:
            reasons = "; ".join(f"rank {r}: {why}" for r, why in sorted(failed.items()))
            text = f"rank {self.rank} waits for ranks that have failed: {reasons}"
            error = RankFailed(text, ranks=failed)
            error.echo = True
            raise error
        ended = ", ".join(map(str, sorted(group.gone))) or "none"
        raise DeadlockError(
            f"deadlock: ranks {waits} wait for messages that no rank will send (ended: {ended})"
        )

    def split(self, color: int | None, key: int) -> SimulatedBackend | None:
        """Return a backend over the ranks of one color, ordered by key, or None for color None."""
        group, number = self._group, self._splits
        self._splits += 1
        with group.condition:
            entries = group.splits[number]
            entries.append((color, key, self.rank))
            group.wake_all()
        self.wait(lambda: len(entries) == self.size, None)
        if color is None:
            return None
        members = [r for _, r in sorted((k, r) for c, k, r in entries if c == color)]
        return self._over(members, (number, color))

    def unreceived(self) -> list[tuple[int, int, int]]:
        """Return sorted (source, target, count), one per tag, of messages that nobody received.

        Late and lost messages do not count.
        """
        left = [(s, t, len(box)) for (s, t, _), box in self._group.boxes.items() if box]
        return sorted(left)

    def leave(self, why: str = "finished") -> None:
        """Mark this rank as ended, here and in all groups; `why` is "finished" or a failure."""
        group = self._group
        with group.condition:
            group.gone[self.rank] = why
            group.waiting.discard(self.rank)
            group.condition.notify_all()
        for part in self._parts:
            part.leave(why)

    def arrive(self, sequence: int, deadline: float | None, progress: Progress = None) -> bool:
        """Wait for all ranks; wake them first, as an announcement on the board is no message."""
        with self._group.condition:
            self._group.wake_all()
        return super().arrive(sequence, deadline, progress)

    def abort(self, code: int) -> None:
        """Mark this rank as failed."""
        self.leave(f"aborted with {code}")


def _echo(error: BaseException) -> int:
    # A timeout may follow another rank's error; what names the rank that failed always does.
    if getattr(error, "echo", False) or isinstance(error, CommunicatorBroken):
        return 2
    return int(isinstance(error, (DeadlockError, CollectiveTimeout)))


def run_group(
    backends: Sequence[SimulatedBackend], fn: Callable[[SimulatedBackend], Any], timeout: float
) -> list[Any]:
    """Run ``fn(backend)`` for every rank, each in a thread, and return the results by rank.

    Raises the error of the lowest rank that failed by itself, with the rank in front of its text;
    TimeoutError if a rank has not ended `timeout` seconds after the start, and none has failed.
    """
    size = len(backends)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def body(backend: SimulatedBackend) -> None:
        try:
            results[backend.rank] = fn(backend)
            backend.leave()
        except BaseException as error:
            errors[backend.rank] = error
            backend.leave(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=body, args=(b,), daemon=True) for b in backends]
    until = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if errors:
        # Errors of ranks that only noticed another rank's failure come last: they are no cause.
        first = min(errors, key=lambda r: (_echo(errors[r]), r))
        error = errors[first]
        text = str(error.args[0]) if error.args else repr(error)
        if not text.startswith(f"rank {first}"):
            error.args = (f"rank {first}: {text}", *error.args[1:])
        raise error
    alive = [b.rank for b, thread in zip(backends, threads) if thread.is_alive()]
    if alive:
        raise TimeoutError(f"simulated ranks {alive} have not ended within {timeout} s")
    return results
