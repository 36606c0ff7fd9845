"""The time of a schedule in the alpha-beta-gamma model.

A message of n bytes takes ``alpha + n * beta``, combining n bytes takes ``n * gamma``.  Every rank
has one full-duplex port: it sends one message and receives one message at a time.  It combines one
message at a time, once all messages of the round have arrived.  Copies cost nothing.

Ranks that share memory (see :class:`Sharing`) pay for their meetings, and for the bytes that they
read and store in each other's memory::

    Meet    meeting for each rank awaited, once the last of them has come
    Get     access + n * read                 Put    access + n * store
    Fold    access + n * read for each other rank, n * combine for each combination
    Copy    n * store into a buffer such as a slot, where others read; else nothing
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..errors import InvalidArgument, Unsupported
from .exchange import Posted
from .machine import Machine, Proof
from .prove import prepare
from .registry import Algorithm, Choice, Groups
from .rounds import (
    BUFFERS,
    Blocks,
    Copy,
    Fold,
    Get,
    Meet,
    Put,
    Reduce,
    Schedule,
    block_tuple,
    blocks,
)
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
class Sharing:
    """The memory of a node, which its ranks share: all of them reach it at the same time.

    Attributes
    ----------
    meeting : float
        Seconds of a meeting, for each rank awaited.
    read, store : float
        Seconds per byte read in the memory of a rank that has just written it, and per byte stored
        there, while the data stay in the caches.
    combine : float
        Seconds per byte combined, besides its reading.
    beyond : float
        Seconds per byte of either, if the data exceed the caches.
    cache : int
        Bytes of the data of a collective up to which they stay in the caches.
    access : float
        Seconds of each access: of a system call where memory is not mapped.
    """

    meeting: float
    read: float
    store: float
    combine: float
    beyond: float
    cache: int
    access: float = 0.0

    def rates(self, nbytes: int) -> Sharing:
        """Return the rates for data of `nbytes`: `beyond` is in `read` and `store` if it counts."""
        if nbytes <= self.cache:
            return self
        return replace(self, read=self.beyond, store=self.beyond)


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
    read, stored : tuple of int
        Bytes that each rank reads and stores in the memory of other ranks, by rank.
    proof : Proof
        Proof of the schedule, from the same run.
    """

    seconds: float
    nbytes: int
    sent: tuple[int, ...]
    between: tuple[int, ...]
    read: tuple[int, ...]
    stored: tuple[int, ...]
    proof: Proof


class TimedMachine(Machine):
    """The prover's machine with times: a message takes the seconds of the model to arrive.

    So does a meeting to end, and a rank to combine, and to read and store in others' memory.
    """

    def cost(
        self,
        pieces: list[int],
        rates: tuple[float, float, float],
        groups: Groups,
        link: Link | None,
        sharing: Sharing,
    ) -> Cost:
        """Run all ranks and return the cost.

        `pieces` are the bytes of each block, after the cut into segments; `rates` are alpha, beta
        and gamma.  Messages between `groups` take alpha and beta of `link`, if it is not None.
        """
        self.pieces, (self.alpha, self.beta, self.gamma), self.link = pieces, rates, link
        self.sharing = sharing
        self.group = {rank: g for g, group in enumerate(groups) for rank in group}
        self.now = 0.0
        self.free: dict[tuple[str, int], float] = {}  # the time from which a port is free
        self.counter = itertools.count()
        self.events: list[tuple[float, int, Callable[[], Any]]] = []
        self.queue: list[tuple[Any, ...]] = []  # messages that wait for free ports
        self.bytes_sent = [0] * self.size
        self.bytes_between = [0] * len(groups)
        self.bytes_read, self.bytes_stored = [0] * self.size, [0] * self.size
        proof = self.run()
        sent, between = tuple(self.bytes_sent), tuple(self.bytes_between)
        read, stored = tuple(self.bytes_read), tuple(self.bytes_stored)
        return Cost(self.now, sum(sent), sent, between, read, stored, proof)

    def _drain(self) -> None:
        # Time stands still while strands post what they can; then the next events happen at once.
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
        if not self._delays(strand):
            super()._wake(strand)

    def _delays(self, strand: Strand) -> bool:
        seconds = self._work(strand)
        if not seconds:
            return False
        processor = ("works", strand.rank)
        end = max(self.free.get(processor, 0.0), self.now) + seconds
        self.free[processor] = end
        self._at(end, partial(super()._wake, strand))
        return True

    def _work(self, strand: Strand) -> float:
        """Return the seconds in which a rank combines, reads and stores in its present round."""
        sharing, rank, seconds = self.sharing, strand.rank, 0.0
        for index, step in enumerate(strand.steps):
            if isinstance(step, Reduce):
                seconds += self.gamma * self._length(strand.received[index][1])
            elif isinstance(step, Fold):
                assert self.shared is not None
                peers = self.shared.ranks(strand, step, step.peers)
                others = [peer for peer in peers if peer != rank]
                nbytes = self._held(others[0], step.source, step.blocks) if others else 0
                self.bytes_read[rank] += len(others) * nbytes
                seconds += len(others) * (sharing.access + nbytes * sharing.read)
                seconds += (len(peers) - 1) * nbytes * sharing.combine
            elif isinstance(step, Get):
                nbytes = self._held(step.peer, step.source, step.blocks)
                self.bytes_read[rank] += nbytes
                seconds += sharing.access + nbytes * sharing.read
            elif isinstance(step, Put):
                nbytes = self._held(rank, step.source, step.blocks)
                self.bytes_stored[rank] += nbytes
                seconds += sharing.access + nbytes * sharing.store
            elif isinstance(step, Copy) and step.target not in BUFFERS:
                seconds += self._held(rank, step.source, step.source_blocks) * sharing.store
        return seconds

    def _held(self, rank: int, buffer: str, spec: Blocks) -> int:
        """Return the bytes in these blocks of a buffer; what the prover will refuse has none."""
        held = self.memory.values[rank].get(buffer, {}) if rank in range(self.size) else {}
        return self._length([held[block] for block in block_tuple(spec) if block in held])

    def _depart(self, strand: Strand) -> None:
        meet = strand.steps[0]
        assert isinstance(meet, Meet)
        awaited = set(meet.group if meet.awaits is None else meet.awaits) - {strand.rank}
        end = self.now + len(awaited) * self.sharing.meeting
        self._at(end, partial(super()._depart, strand))

    def _at(self, time: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self.events, (time, next(self.counter), action))

    def _length(self, values: list[int]) -> int:
        return sum(self.pieces[self.memory.terms.datum(value)[1]] for value in values)


__all__ = ["Cost", "Link", "Sharing", "cost"]


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
    sharing: Sharing | None = None,
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
    sharing : Sharing, optional
        The memory that the ranks of a group share.  By default it is like messages: to await a rank
        takes alpha, to read or store a byte beta, to combine it gamma.

    Returns
    -------
    Cost
        Seconds, bytes and the proof.

    Raises
    ------
    ScheduleError
        If the schedule is wrong.
    Unsupported
        If it is of the memory "kernels", which the model has no times for.

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
    if known.memory is not None and known.memory.kernels:
        raise Unsupported(f"{known.label}: there are no times for the thread blocks of GPUs")
    assert isinstance(machine, TimedMachine)
    pieces = [
        piece.stop - piece.start
        for block in blocks(nbytes, max(machine.count // segments, 1))
        for piece in blocks(block.stop - block.start, segments)
    ]
    shared = sharing or Sharing(alpha, beta, beta, gamma, beta, nbytes)
    return machine.cost(
        pieces, (alpha, beta, gamma), groups or (tuple(range(size)),), link, shared.rates(nbytes)
    )
