"""The time of a schedule, by measured curves or in the alpha-beta-gamma model.

A message takes the seconds of a curve over its bytes, which depends on what its round does; see
:class:`~mpidist.schedule.model.Messages`.  In the alpha-beta-gamma model of papers every curve is a
straight line: a message of n bytes takes ``alpha + n * beta``, combining n bytes ``n * gamma``, and
copies cost nothing.  Every rank has one full-duplex port: it sends one message and receives one
message at a time.  It combines one message at a time, once all messages of the round have arrived.

Ranks that share memory (see :class:`Sharing`) pay for their meetings, and for the bytes that they
read and store in each other's memory::

    Meet    meeting for each rank awaited, once the last of them has come
    Get     read of n bytes                   Put    store of n bytes
    Fold    fold of n bytes for each combination, read if there are more ranks to read from
    Copy    store of n bytes into a buffer such as a slot, where others read; else copy
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..errors import InvalidArgument, Unsupported
from .clocks import MOST_WAITING, Rates, seconds_of
from .exchange import Posted
from .machine import Machine, Proof
from .model import Curve, Messages
from .prove import prepare, resolved
from .ranks import Unfit
from .registry import Algorithm, Choice, Groups
from .rounds import (
    BUFFERS,
    Blocks,
    Copy,
    Fold,
    Get,
    Meet,
    Parallel,
    Put,
    Recv,
    Reduce,
    Schedule,
    Send,
    block_tuple,
    blocks,
)
from .score import check_fans, loads_of, scores_of
from .strand import Strand

PROVED = 128
"""Ranks up to which :func:`cost` also proves the schedule."""
MANY = 100_000
"""Ranks above which a schedule needs a pattern: one by one they would take minutes."""

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

    @property
    def messages(self) -> Messages:
        """The times of messages: straight lines."""
        return Messages.straight(self.alpha, self.beta, 0.0)


@dataclass(frozen=True)
class Sharing:
    """The memory of a node, which its ranks share: all of them reach it at the same time.

    Attributes
    ----------
    meeting : float
        Seconds of a meeting, for each rank awaited.
    read, store : Curve
        Seconds of reading bytes in the memory of a rank that has just written them, and of storing
        bytes there, or into a buffer such as a slot, where others read.
    fold : Curve
        Seconds of reading bytes there, and combining as many with them.
    copy : Curve
        Seconds of copying bytes in a rank's own memory.
    call : float or None
        Seconds of a call beside its rounds; None for those of :class:`~.model.Messages`.
    beyond : Sharing or None
        What holds in place of this, if the data of a collective exceed the caches; None for curves
        that tell it themselves.
    cache : int
        Bytes of the data up to which they stay in the caches, if there is a `beyond`.
    """

    meeting: float
    read: Curve
    store: Curve
    fold: Curve
    copy: Curve
    call: float | None = None
    beyond: Sharing | None = None
    cache: int = 0

    @classmethod
    def straight(
        cls,
        meeting: float,
        read: float,
        store: float,
        combine: float,
        beyond: float,
        cache: int,
        access: float = 0.0,
    ) -> Sharing:
        """Return the model of constants, by which copies in a rank's own memory cost nothing.

        Each access takes `access` (that of a system call where memory is not mapped), and `read` or
        `store` for each byte, both `beyond` if the data exceed `cache` bytes; to combine a byte
        takes `combine` besides.
        """

        def of(read: float, store: float, beyond: Sharing | None) -> Sharing:
            reads, stores, folds = (
                Curve.line(access, slope) for slope in (read, store, read + combine)
            )
            free = Curve.line(0.0, 0.0)
            return cls(meeting, reads, stores, folds, free, None, beyond, cache)

        return of(read, store, of(beyond, beyond, None))

    def for_data(self, nbytes: int) -> Sharing:
        """Return what holds for data of `nbytes`."""
        return self if self.beyond is None or nbytes <= self.cache else self.beyond


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
    rounds : int
        Largest number of rounds of any rank.
    messages : tuple of int
        Messages that each rank sends, by rank.
    proof : Proof or None
        Proof of the schedule, from the same run; None above `PROVED` ranks, which run together.
    """

    seconds: float
    nbytes: int
    sent: tuple[int, ...]
    between: tuple[int, ...]
    read: tuple[int, ...]
    stored: tuple[int, ...]
    rounds: int
    messages: tuple[int, ...]
    proof: Proof | None


class TimedMachine(Machine):
    """The prover's machine with times: a message takes the seconds of the model to arrive.

    So does a meeting to end, and a rank to combine, and to read and store in others' memory.
    """

    def cost(
        self,
        pieces: list[int],
        messages: Messages,
        groups: Groups,
        link: Messages | None,
        sharing: Sharing,
        in_place: bool = False,
    ) -> Cost:
        """Run all ranks and return the cost.

        `pieces` are the bytes of each block, after the cut into segments.  Messages between
        `groups` take the times of `link`, if it is not None.
        """
        self.pieces, self.messages, self.link, self.in_place = pieces, messages, link, in_place
        self.opened, self.ends = [0] * self.size, 0.0
        self.sharing = sharing
        self.group = {rank: g for g, group in enumerate(groups) for rank in group}
        # Nodes that do alike then go on alike: by rank, node 0 would be ahead of the last one.
        ordered = map(sorted, groups if len(groups) > 1 else ())
        self.place = {rank: place for group in ordered for place, rank in enumerate(group)}
        self.now = 0.0
        self.free: dict[tuple[str, int], float] = {}  # the time from which a port is free
        self.counter = itertools.count()
        self.events: list[tuple[float, int, Callable[[], Any]]] = []
        self.queue: list[tuple[Any, ...]] = []  # messages that wait for free ports
        self.posted: dict[Strand, float] = {}  # when a strand's present round was posted
        self.bytes_sent = [0] * self.size
        self.bytes_between = [0] * len(groups)
        self.bytes_read, self.bytes_stored = [0] * self.size, [0] * self.size
        proof = self.run()
        call = self.messages.call
        if self.shared is not None and sharing.call is not None:
            call = sharing.call
        seconds = call + max(self.now, self.ends)
        strand, both = self.messages.strand, zip(self.opened, self.bytes_sent)
        seconds += max(n and n * strand.at(nbytes / n) for n, nbytes in both)
        sent, between = tuple(self.bytes_sent), tuple(self.bytes_between)
        read, stored = tuple(self.bytes_read), tuple(self.bytes_stored)
        figures = sum(sent), sent, between, read, stored, proof.rounds, proof.sent
        return Cost(seconds, *figures, proof)

    def _drain(self) -> None:
        # Time stands still while strands post what they can; then the next events happen at once.
        super()._drain()
        while self.queue or self.events:
            self._begin_messages()
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now * _SAME:
                heapq.heappop(self.events)[2]()
            super()._drain()

    def _advance(self, strand: Strand) -> None:
        self.posted[strand] = self.now
        super()._advance(strand)

    def _move(self, send: Posted, receive: Posted, sent: bool = False) -> None:
        # First come, first served; within a round in the order written, then by strand; of several
        # nodes then by the sender's place in its node.
        place = self.place.get(send.strand.rank, 0)
        turn = (self.now, send.strand.path, send.index, place, next(self.counter))
        insort(self.queue, (*turn, send, receive))

    def _begin_messages(self) -> None:
        """Begin every queued message whose ports are free (see `_ports`), and set its arrival.

        A message may have begun before its receive was posted; at least the seconds after which its
        rank goes on are still to come then.
        """
        left = []
        for entry in self.queue:
            send, receive = entry[-2:]
            source, target = send.strand.rank, receive.strand.rank
            ports, model = self._ports(source, target)
            works: list[tuple[str, int]] = []
            waits = ports
            if model.occupies and self.shared is None:
                works = [("works", source), ("works", target)]
                waits = [*ports, ("combines", source), ("combines", target)]
            if any(self.free.get(port, 0.0) > self.now * _SAME for port in waits):
                left.append(entry)
                continue
            length = self._length(send.content)
            self._count(source, target, length)
            both = _does_both(send.strand) or _does_both(receive.strand)
            seconds, busy, onward = model.message(length, both, self._wrote(send))
            begin = max(self.posted[send.strand], *(self.free.get(port, 0.0) for port in waits))
            begin = max(begin, self.now - (seconds - onward))
            self.free.update(dict.fromkeys(ports, begin + busy))
            self.free.update({each: max(self.free.get(each, 0.0), begin + busy) for each in works})
            if busy < seconds:
                self._at(max(begin + busy, self.now), _nothing)  # then the next message may begin
            # What the receiver learns of memory must not be of the sender's later rounds.
            early = onward < seconds and self.shared is None
            if early:
                self._at(max(begin + onward, self.now), partial(self._goes_on, send, receive))
            self._at(begin + seconds, partial(super()._move, send, receive, early))
        self.queue = left

    def _goes_on(self, send: Posted, receive: Posted) -> None:
        """End a message for the rank that sends it."""
        strand = send.strand
        strand.clock = max(strand.clock, send.clock + 1, receive.clock + 1)
        strand.pending -= 1
        if strand.pending == 0:
            self._wake(strand)

    def _wrote(self, send: Posted) -> bool:
        """Return whether the run has written lines of a message on the rank that sends it."""
        step, written = send.step, self.memory.written[send.strand.rank]
        return any((step.buffer, block) in written for block in block_tuple(step.blocks))

    def _count(self, source: int, target: int, length: int) -> None:
        self.bytes_sent[source] += length
        if self.group[source] != self.group[target]:
            self.bytes_between[self.group[source]] += length

    def _ports(self, source: int, target: int) -> tuple[list[tuple[str, int]], Messages]:
        """Return the ports that a message occupies, and its times: also of a link between groups.

        A port serves one message at a time.  It is (kind, number): "sends" or "receives" of a rank,
        "leaves" or "enters" of a group.
        """
        ports = [("sends", source), ("receives", target)]
        own, other = self.group[source], self.group[target]
        if own == other or self.link is None:
            return ports, self.messages
        ports += [("leaves", own), ("enters", other)]
        return ports, self.link

    def _open(self, parent: Strand, item: Parallel) -> bool:
        self.opened[parent.rank] += len(item.strands)
        return super()._open(parent, item)

    def _end(self, strand: Strand) -> None:
        super()._end(strand)
        if strand.parent is None:
            self.ends = max(self.ends, self.now + self._copied_at_last(strand.rank))

    def _copied_at_last(self, rank: int) -> float:
        """Return the seconds in which a rank copies the blocks of the result that it had before."""
        contract, written = self.contract, self.memory.written[rank]
        # The root of a broadcast has one array.
        apart = contract.input_buffer == "out" and contract.name != "broadcast"
        if self.in_place or self.shared is not None or not apart:
            return 0.0
        held = self.memory.values[rank]["out"]
        blocks = contract.output_blocks(rank, self.size, self.root, self.count)
        left = [held[block] for block in blocks if ("out", block) not in written and block in held]
        nbytes = self._length(left)
        return self.messages.copy.at(nbytes) if nbytes else 0.0

    def _wake(self, strand: Strand) -> None:
        if not self._delays(strand):
            super()._wake(strand)

    def _delays(self, strand: Strand) -> bool:
        seconds = self._work(strand)
        if not seconds:
            return False
        # Until then it does not combine again, nor begin a message that keeps its processor busy.
        end = max(self.now, self.free.get(("works", strand.rank), 0.0)) + seconds
        self.free["works", strand.rank] = self.free["combines", strand.rank] = end
        self._at(end, partial(super()._wake, strand))
        return True

    def _work(self, strand: Strand) -> float:
        """Return the seconds in which a rank combines, reads and stores in its present round."""
        sharing, rank, seconds = self.sharing, strand.rank, 0.0
        for index, step in enumerate(strand.steps):
            if isinstance(step, Reduce):
                places, values = strand.received[index]
                written = self.memory.written[rank]
                apart = not self.in_place and any(place not in written for place in places)
                seconds += self.messages.combining(self._length(values), apart)
            elif isinstance(step, Fold):
                assert self.shared is not None
                peers = self.shared.ranks(strand, step, step.peers)
                others = [peer for peer in peers if peer != rank]
                nbytes = self._held(others[0], step.source, step.blocks) if others else 0
                self.bytes_read[rank] += len(others) * nbytes
                folds = min(len(peers) - 1, len(others))  # the first operand is only read, or here
                seconds += folds * sharing.fold.at(nbytes)
                seconds += (len(others) - folds) * sharing.read.at(nbytes)
            elif isinstance(step, Get):
                nbytes = self._held(step.peer, step.source, step.blocks)
                self.bytes_read[rank] += nbytes
                seconds += sharing.read.at(nbytes)
            elif isinstance(step, Put):
                nbytes = self._held(rank, step.source, step.blocks)
                self.bytes_stored[rank] += nbytes
                seconds += sharing.store.at(nbytes)
            elif isinstance(step, Copy):
                nbytes = self._held(rank, step.source, step.source_blocks)
                curve = self.messages.copy if self.shared is None else sharing.copy
                if step.target not in BUFFERS:
                    curve = sharing.store
                seconds += curve.at(nbytes) if nbytes else 0.0
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


def _does_both(strand: Strand) -> bool:
    """Return whether a rank sends and receives in the present round of a strand."""
    steps = strand.steps
    sends = any(isinstance(step, Send) for step in steps)
    return sends and any(isinstance(step, (Recv, Reduce)) for step in steps)


def _nothing() -> None:
    """Do nothing, at a time from which something else is possible."""


__all__ = ["Cost", "Link", "Sharing", "cost", "timed"]


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
        Seconds, bytes, and up to `PROVED` ranks the proof; above, ranks that do alike run once.

    Raises
    ------
    ScheduleError
        If the schedule is wrong; above `PROVED` ranks only if it has no pattern.
    Unsupported
        If it is of the memory "kernels", which the model has no times for; if above `MANY` ranks it
        has no pattern that they share.

    Examples
    --------
    >>> cost("allreduce", "ring", 4, 1000, alpha=1.0, beta=0.0).seconds
    6.0
    """
    for name, value in (("alpha", alpha), ("beta", beta), ("gamma", gamma)):
        if value < 0:
            raise InvalidArgument(f"{name}={value}: expected a number >= 0")
    if isinstance(size, int) and size > PROVED and segments == 1:
        known, degree = resolved(collective, choice, size, root, arity=arity)
        rates = Rates(alpha, beta, gamma, *(() if link is None else (link.alpha, link.beta, True)))
        try:
            return together(known, size, nbytes, rates, root=root, arity=degree, groups=groups)
        except Unfit as unfit:
            if size > MANY:
                raise Unsupported(
                    f"{known.label} on {size} ranks has no pattern that many ranks share: {unfit}; "
                    f"ranks run one by one up to {MANY}"
                ) from None
    return timed(
        *(collective, choice, size, nbytes, Messages.straight(alpha, beta, gamma)),
        root=root,
        arity=arity,
        groups=groups,
        segments=segments,
        window=window,
        link=link,
        sharing=sharing or Sharing.straight(alpha, beta, beta, gamma, beta, nbytes),
    )


def together(
    algorithm: Algorithm,
    size: int,
    nbytes: int,
    rates: Rates,
    *,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
) -> Cost:
    """Return the cost of a schedule whose ranks run together, as many as do the same.

    Parameters are those of :func:`cost`.  There is no proof.  Unsupported if the algorithm does not
    serve so many ranks or these groups; Unfit if its ranks share no pattern, or it is one in shared
    memory.
    """
    if algorithm.memory is not None:
        raise Unfit("ranks that reach each other's memory")
    if nbytes < 0:
        raise InvalidArgument(f"nbytes={nbytes}: expected a number >= 0")
    if (reason := algorithm.unsupported(size, groups)) is not None:
        raise Unsupported(f"{algorithm.label}: {reason}")
    several = groups is not None and len(groups) > 1
    rates = rates if several else replace(rates, linked=False)
    if rates.linked and size**2 > 2 * MOST_WAITING:  # the messages of one rank wait for its port
        check_fans(algorithm, size, {"root": root, "arity": arity, "groups": groups})
    wrong = Unfit("its ranks have nothing in common")
    for score in scores_of(algorithm, size, nbytes, root=root, arity=arity, groups=groups):
        nodes = np.zeros(score.lanes, np.int64)
        if score.count == 1:
            for number, group in enumerate(groups or ()):
                nodes[list(group)] = number
        try:
            seconds = seconds_of(score, rates, nodes)
            break
        except Unfit as unfit:
            wrong = unfit
    else:
        raise wrong
    loads = loads_of(score, nodes)
    sent, messages = (np.tile(each, score.count) for each in (loads.sent, loads.messages))
    left = np.zeros(int(nodes.max()) + 1, np.int64)
    if several:
        np.add.at(left, nodes, loads.left)
    if several and score.count > 1:
        left = np.tile(left, score.count)
    none = (0,) * size
    figures = tuple(sent.tolist()), tuple(left.tolist()), none, none, loads.rounds
    return Cost(seconds, int(sent.sum()), *figures, tuple(messages.tolist()), None)


def timed(
    collective: str,
    choice: str | Algorithm | Choice | Callable[..., Schedule],
    size: int,
    nbytes: int,
    messages: Messages,
    *,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
    segments: int = 1,
    window: int | None = None,
    link: Link | Messages | None = None,
    sharing: Sharing | None = None,
    in_place: bool = False,
) -> Cost:
    """Return the cost of a schedule by the curves of a machine.

    Parameters
    ----------
    collective, choice, size, nbytes, root, arity, groups, segments, window
        As for :func:`cost`.
    messages : Messages
        The times of messages, and of combining and copying.
    link : Link or Messages, optional
        The times of messages between `groups`; a group sends and receives one of these at a time.
        By default they are like all other messages.
    sharing : Sharing, optional
        The memory that the ranks of a group share, which schedules in it need.
    in_place : bool
        Whether the result is written over the input.

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
    """
    if nbytes < 0:
        raise InvalidArgument(f"nbytes={nbytes}: expected a number >= 0")
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
    near = sharing or Sharing.straight(0.0, 0.0, 0.0, 0.0, 0.0, nbytes)
    where = groups or (tuple(range(size)),)
    far = link.messages if isinstance(link, Link) else link
    return machine.cost(pieces, messages, where, far, near.for_data(nbytes), in_place)
