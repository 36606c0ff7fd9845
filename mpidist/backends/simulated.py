"""The simulated backend: every rank a thread of one process, with faults on demand.

Shipped for users' own tests: no MPI is needed, a deadlock is seen at once instead of at a
deadline, and messages can be delayed, dropped, or their sender killed.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CollectiveMismatch, DeadlockError, InvalidArgument, RankFailed
from .base import Backend
from .board import Board, private_words

_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Faults:
    """What goes wrong in a simulated group.

    Parameters
    ----------
    delay : callable, optional
        ``(source, target, number)`` to the seconds by which that message is late; `number` counts
        the messages from source to target from 0.
    drop : callable, optional
        ``(source, target, number)`` to True if the message is lost.
    kill : dict of int to int
        Rank to the number of messages after which it dies: its next send raises `RankFailed`.
    """

    delay: Callable[[int, int, int], float] | None = None
    drop: Callable[[int, int, int], bool] | None = None
    kill: dict[int, int] = field(default_factory=dict)


class _Group:
    """What the ranks of one group share: mailboxes, and who waits."""

    def __init__(self, size: int, faults: Faults, nodes: Sequence[object]):
        self.size, self.faults, self.nodes = size, faults, tuple(nodes)
        self.condition = threading.Condition()
        self.boxes: dict[tuple[int, int, int], deque] = defaultdict(deque)
        self.version = [0] * size
        self.numbers: dict[tuple[int, int], int] = defaultdict(int)
        self.waiting: set[int] = set()
        self.gone: dict[int, str] = {}
        self.words = private_words(size)
        self.splits: dict[int, list] = defaultdict(list)
        self.created: dict[tuple[int, object], _Group] = {}
        self.under_way: dict[tuple[int, int, int], deque[_Late]] = defaultdict(deque)
        self.late = 0  # messages under way that are not yet there, or lost

    def deliver(self, key: tuple[int, int, int], payload: bytes, late: bool = False) -> _Late:
        """Put a message into its mailbox, behind those that are still under way to it."""
        message = _Late(payload, late)
        with self.condition:
            self.under_way[key].append(message)
            self.late += late
            self._arrive(key)
        return message

    def wake_all(self) -> None:
        """Have every rank that waits look again: something has changed that is no message."""
        self.version = [v + 1 for v in self.version]
        self.waiting.clear()
        self.condition.notify_all()

    def arrive(self, key: tuple[int, int, int], message: _Late) -> None:
        """Note that a message which was late is there."""
        with self.condition:
            message.late = False
            self.late -= 1
            self._arrive(key)

    def _arrive(self, key: tuple[int, int, int]) -> None:
        under_way = self.under_way[key]
        while under_way and not under_way[0].late:
            self.boxes[key].append(under_way.popleft().payload)
        self.version[key[1]] += 1
        self.waiting.discard(key[1])
        self.condition.notify_all()


@dataclass(slots=True)
class _Late:
    """A message under way; one that is lost is late for ever, and holds up those behind it."""

    payload: bytes
    late: bool


class SimulatedRequest:
    """A message of a simulated group to be received."""

    __slots__ = ("_group", "_key", "_data", "_done", "_queue")

    def __init__(self, group: _Group, key: tuple[int, int, int], data: np.ndarray, queue: deque):
        self._group, self._key, self._data = group, key, data
        self._queue, self._done = queue, False
        queue.append(self)

    def test(self) -> bool:
        """Take the message if it is there; receives are served in the order they were posted."""
        while not self._done and self._queue:
            with self._group.condition:
                box = self._group.boxes[self._key]
                payload = box.popleft() if box else None
            if payload is None:
                return False
            self._queue.popleft()._take(payload)
        return self._done

    def _take(self, payload: bytes) -> None:
        self._done = True
        if len(payload) != self._data.nbytes:
            source, target, _ = self._key
            raise CollectiveMismatch(
                f"rank {target}: expected {self._data.nbytes} bytes from rank {source}, which sent "
                f"{len(payload)}: the ranks disagree on the array's length"
            )
        self._data.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)


class SimulatedShortRequest(SimulatedRequest):
    """A short message to be received, of whatever length."""

    __slots__ = ("content",)

    def _take(self, payload: bytes) -> None:
        self._done = True
        self.content = payload

    def release(self) -> None:
        """Do nothing: each message has memory of its own."""


class _Sent:
    """A message that was sent: it was copied into the mailbox of the receiver."""

    def test(self) -> bool:
        """Tell that it has gone."""
        return True


_SENT = _Sent()


class SimulatedBackend(Backend):
    """One rank of a group of threads; see :meth:`create_group`."""

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
        self._sent = 0
        self._parts: list[SimulatedBackend] = []  # this rank in the groups split off

    @classmethod
    def create_group(
        cls, size: int, faults: Faults | None = None, nodes: Sequence[object] | None = None
    ) -> list[SimulatedBackend]:
        """Create the backends of `size` ranks.

        Parameters
        ----------
        size : int
            Number of ranks, ≥ 1.
        faults : Faults, optional
            What goes wrong.
        nodes : sequence, optional
            A key per rank; ranks with equal keys share a node.  By default all do.
        """
        if not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"size={size!r}: a group needs at least 1 rank")
        if nodes is not None and len(nodes) != size:
            raise InvalidArgument(f"nodes has {len(nodes)} keys for {size} ranks")
        group = _Group(size, faults or Faults(), nodes if nodes is not None else (0,) * size)
        return [cls(group, rank) for rank in range(size)]

    def isend(self, data: np.ndarray, peer: int, tag: int) -> _Sent:
        """Copy the data and put them into the mailbox of `peer`."""
        return self._send(data.tobytes(), peer, tag)

    def isend_short(self, content: bytes, peer: int, tag: int) -> _Sent:
        """Put a short message into the mailbox of `peer`."""
        return self._send(content, peer, tag)

    def _send(self, payload: bytes, peer: int, tag: int) -> _Sent:
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
        """Post a receive of exactly the data's length."""
        key = (peer, self.rank, tag)
        return SimulatedRequest(self._group, key, data, self._posted[key])

    def irecv_short(self, peer: int, tag: int) -> SimulatedShortRequest:
        """Post a receive of a short message."""
        key = (peer, self.rank, tag)
        return SimulatedShortRequest(self._group, key, _NOTHING, self._posted[key])

    def wait(
        self,
        test: Callable[[], bool],
        deadline: float | None,
        progress: Callable[[], object] | None = None,
    ) -> bool:
        """Wait for `test`; `DeadlockError` once every rank waits and no message is under way."""
        group, rank = self._group, self.rank
        while True:
            seen = group.version[rank]
            if test():
                return True
            if progress is not None:
                progress()
            with group.condition:
                if group.version[rank] != seen:
                    continue
                group.waiting.add(rank)
                if len(group.waiting) + len(group.gone) >= self.size and not group.late:
                    self._stuck()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    group.waiting.discard(rank)
                    return False
                group.condition.wait(left if left is not None and left < 0.1 else 0.1)
                group.waiting.discard(rank)

    def _stuck(self) -> None:
        """Raise what is the matter when every rank waits or is gone; the others find the same."""
        group = self._group
        waits = ", ".join(map(str, sorted(group.waiting)))
        group.waiting.discard(self.rank)  # it may catch the error and go on
        failed = {r: why for r, why in group.gone.items() if why != "finished"}
        if failed:
            told = "; ".join(f"rank {r}: {why}" for r, why in sorted(failed.items()))
            error = RankFailed(f"rank {self.rank} waits for ranks that are gone: {told}")
            error.echo = True
            raise error
        ended = ", ".join(map(str, sorted(group.gone))) or "none"
        raise DeadlockError(
            f"deadlock: ranks {waits} wait for messages that nobody will send (ended: {ended})"
        )

    def split(self, color: int | None, key: int) -> SimulatedBackend | None:
        """Give a backend over the ranks of one color, ordered by key; every rank must call it."""
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
        with group.condition:
            sub = group.created.get((number, color))
            if sub is None:
                nodes = [group.nodes[r] for r in members]
                sub = group.created[number, color] = _Group(len(members), group.faults, nodes)
        self._parts.append(SimulatedBackend(sub, members.index(self.rank)))
        return self._parts[-1]

    def unreceived(self) -> list[tuple[int, int, int]]:
        """Give (source, target, messages) of what was sent in the group and never received."""
        left = [(s, t, len(box)) for (s, t, _), box in self._group.boxes.items() if box]
        return sorted(left)

    def leave(self, why: str = "finished") -> None:
        """Note that this rank takes no further part."""
        group = self._group
        with group.condition:
            group.gone[self.rank] = why
            group.waiting.discard(self.rank)
            group.condition.notify_all()
        for part in self._parts:
            part.leave(why)

    def arrive(
        self,
        sequence: int,
        deadline: float | None,
        progress: Callable[[], object] | None = None,
    ) -> bool:
        """Wait until every rank has announced `sequence`; False if the deadline passed."""
        with self._group.condition:
            self._group.wake_all()
        return super().arrive(sequence, deadline, progress)

    def abort(self, code: int) -> None:
        """Note that this rank has failed."""
        self.leave(f"aborted with {code}")


def _echo(error: BaseException) -> int:
    return 2 if getattr(error, "echo", False) else int(isinstance(error, DeadlockError))


def run_group(
    backends: Sequence[SimulatedBackend], fn: Callable[[SimulatedBackend], Any], timeout: float
) -> list[Any]:
    """Run ``fn(backend)`` for every rank, each in a thread; used by ``run_simulated``.

    Raises
    ------
    Exception
        Of the lowest rank that failed on its own account, with a note that names the rank.
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
        # Those that only found out that another rank was gone come last: they are not the cause.
        first = min(errors, key=lambda r: (_echo(errors[r]), r))
        error = errors[first]
        told = str(error.args[0]) if error.args else repr(error)
        if not told.startswith(f"rank {first}"):
            error.args = (f"rank {first}: {told}", *error.args[1:])
        raise error
    alive = [b.rank for b, thread in zip(backends, threads) if thread.is_alive()]
    if alive:
        raise TimeoutError(f"simulated ranks {alive} have not ended within {timeout} s")
    return results
