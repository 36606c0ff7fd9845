"""The time of a schedule in the alpha-beta-gamma model.

A message of n bytes takes ``alpha + n * beta``, combining n bytes takes ``n * gamma``.  Every rank
has one full-duplex port: it sends one message and receives one message at a time.  It combines one
message at a time, once all messages of the round have arrived.  Copies cost nothing.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import InvalidArgument, Unsupported
from .exchange import Posted
from .machine import Machine, Proof
from .prove import prepare
from .registry import Algorithm, Choice, Groups
from .rounds import Reduce, Schedule, blocks
from .strand import Strand

_SAME = 1 + 1e-9  # times that differ by rounding are equal; else the order would be arbitrary


@dataclass(frozen=True)
class Link:
    """The link of each group of ranks (a node) to the others: one message per direction at a time.

    Attributes
    ----------
    alpha : float
        Seconds per message.
    beta : float
        Seconds per byte.
    """

    alpha: float
    beta: float


@dataclass(frozen=True)
class Cost:
    """The time and the bytes of a schedule.

    Attributes
    ----------
    seconds : float
        Time until the last rank has finished.
    nbytes : int
        Bytes of all messages together.
    sent : tuple of int
        Bytes that each rank sends, by rank.
    between : tuple of int
        Bytes that each group of ranks (a node) sends to other groups, by group.
    proof : Proof
        Proof of the schedule, from the same run.
    """

    seconds: float
    nbytes: int
    sent: tuple[int, ...]
    between: tuple[int, ...]
    proof: Proof


class TimedMachine(Machine):
    """The prover's machine with times: a message takes the seconds of the model to arrive."""

    def cost(
        self,
        pieces: list[int],
        rates: tuple[float, float, float],
        groups: Groups,
        link: Link | None,
    ) -> Cost:
        """Run all ranks and return the cost.

        `pieces` are the bytes of each block, after the cut into segments; `rates` are alpha, beta
        and gamma.  Messages between `groups` take alpha and beta of `link`, if it is not None.
        """
        self.pieces, (self.alpha, self.beta, self.gamma), self.link = pieces, rates, link
        self.group = {rank: g for g, group in enumerate(groups) for rank in group}
        self.now = 0.0
        self.free: dict[tuple[str, int], float] = {}  # the time from which a port is free
        self.counter = itertools.count()
        self.events: list[tuple[float, int, Callable[[], Any]]] = []
        self.queue: list[tuple[Any, ...]] = []  # messages that wait for free ports
        self.bytes_sent = [0] * self.size
        self.bytes_between = [0] * len(groups)
        proof = self.run()
        sent = tuple(self.bytes_sent)
        return Cost(self.now, sum(sent), sent, tuple(self.bytes_between), proof)

    def _drain(self) -> None:
        super()._drain()
        while self.queue or self.events:
            self._begin_messages()
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now * _SAME:
                heapq.heappop(self.events)[2]()
            super()._drain()

    def _move(self, send: Posted, receive: Posted) -> None:
        # First come, first served; within a round in the order written, then by strand.
        turn = (self.now, send.strand.path, send.index, next(self.counter))
        insort(self.queue, (*turn, send, receive))

    def _begin_messages(self) -> None:
        """Begin every queued message whose ports are free (see `_ports`), and set its arrival."""
        left = []
        for entry in self.queue:
            send, receive = entry[-2:]
            ports, (alpha, beta) = self._ports(send.strand.rank, receive.strand.rank)
            if any(self.free.get(port, 0.0) > self.now * _SAME for port in ports):
                left.append(entry)
                continue
            length = self._length(send.content)
            self._count(send.strand.rank, receive.strand.rank, length)
            end = self.now + alpha + length * beta
            self.free.update(dict.fromkeys(ports, end))
            self._at(end, partial(super()._move, send, receive))
        self.queue = left

    def _count(self, source: int, target: int, length: int) -> None:
        self.bytes_sent[source] += length
        if self.group[source] != self.group[target]:
            self.bytes_between[self.group[source]] += length

    def _ports(self, source: int, target: int) -> tuple[list[tuple[str, int]], tuple[float, float]]:
        """Return the ports that a message occupies, and its (alpha, beta).

        A port serves one message at a time.  It is (kind, number): "sends" or "receives" of a rank,
        "leaves" or "enters" of a group.
        """
        ports = [("sends", source), ("receives", target)]
        own, other = self.group[source], self.group[target]
        if own == other or self.link is None:
            return ports, (self.alpha, self.beta)
        ports += [("leaves", own), ("enters", other)]
        return ports, (self.link.alpha, self.link.beta)

    def _wake(self, strand: Strand) -> None:
        combined = sum(
            self._length(strand.received[index][1])
            for index, step in enumerate(strand.steps)
            if isinstance(step, Reduce)
        )
        if not combined or not self.gamma:
            super()._wake(strand)
            return
        processor = ("combines", strand.rank)
        end = max(self.free.get(processor, 0.0), self.now) + combined * self.gamma
        self.free[processor] = end
        self._at(end, partial(super()._wake, strand))

    def _at(self, time: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self.events, (time, next(self.counter), action))

    def _length(self, values: list[int]) -> int:
        return sum(self.pieces[self.memory.terms.datum(value)[1]] for value in values)


__all__ = ["Cost", "Link", "cost"]


def cost(
    collective: str,
    choice: str | Algorithm | Choice | Callable[..., Schedule],
    size: int,
    nbytes: int,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
    segments: int = 1,
    window: int | None = None,
    link: Link | None = None,
) -> Cost:
    """Return the cost of a schedule: its time and its bytes.

    Parameters
    ----------
    collective, choice, size, root, arity, groups, segments, window
        As for :func:`~mpidist.schedule.prove`.
    nbytes : int
        Bytes of the data of the collective, which are cut into blocks of about equal length.
    alpha : float
        Seconds per message.
    beta, gamma : float
        Seconds per byte sent, and per byte combined.
    link : Link, optional
        Alpha and beta of messages between `groups`; a group sends and receives one of these at a
        time.  By default they are like all other messages.

    Returns
    -------
    Cost
        Seconds, bytes and the proof.

    Raises
    ------
    ScheduleError
        If the schedule is wrong.
    Unsupported
        If it needs shared memory: the model has no times of meetings and of others' memory.

    Examples
    --------
    >>> cost("allreduce", "ring", 4, 1000, alpha=1.0, beta=0.0).seconds
    6.0
    """
    if nbytes < 0:
        raise InvalidArgument(f"nbytes={nbytes}: expected a number >= 0")
    for name, value in (("alpha", alpha), ("beta", beta), ("gamma", gamma)):
        if value < 0:
            raise InvalidArgument(f"{name}={value}: expected a number >= 0")
    known, machine = prepare(
        collective,
        choice,
        size,
        root,
        arity=arity,
        groups=groups,
        segments=segments,
        window=window,
        machine=TimedMachine,
    )
    if known.memory is not None:
        raise Unsupported(
            f"{known.label} needs {known.memory.name} memory, which the cost model cannot price: "
            "it has the times of messages, not of meetings and of other ranks' memory"
        )
    assert isinstance(machine, TimedMachine)
    pieces = [
        piece.stop - piece.start
        for block in blocks(nbytes, max(machine.count // segments, 1))
        for piece in blocks(block.stop - block.start, segments)
    ]
    return machine.cost(pieces, (alpha, beta, gamma), groups or (tuple(range(size)),), link)
