"""Measurement of the cost model's constants: of messages (α, β), combining (γ), shared memory.

And of the machine's state: the round trip of a cache line.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from ..backends import process_memory
from ..backends.base import Backend
from ..backends.program import Action, store
from ..backends.tags import BLOCKING
from ..calls.arrays import address
from ..errors import CollectiveTimeout, Unsupported
from ..measure import Messenger, add_cost, low, median, parse_size, ping_pong
from ..operations import find_op
from ..schedule.cost import Link, Sharing
from ..schedule.registry import Groups
from ..selection.calibration import Calibration
from ..selection.config import switch
from ..shared_memory.barrier import Barrier
from ..shared_memory.compiled import stream
from ..shared_memory.fold import fold_in_order
from ..shared_memory.heap import Heap
from ..shared_memory.steps import Steps, WordAddresses
from ..topology import Topology


class MeasuredGroup(Messenger, Protocol):
    """The members of a communicator that measurements use."""

    @property
    def topology(self) -> Topology:
        """The ranks of each node."""

    def broadcast(self, x: Any, root: int) -> Any:
        """Broadcast the root's array to every rank."""

    def allreduce(self, x: Any, op: str) -> Any:
        """Combine the arrays of all ranks; every rank gets the result."""

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""


SMALL, LARGE = 8, 1 << 20  # bytes of the two messages
TRIPS = 9  # counted, after one that is not
MOST_PAIRS = 28  # of nodes: all of 8; of more nodes each with the next


@dataclass(frozen=True)
class LinkSpeed:
    """Measured α and β between two ranks.

    Attributes
    ----------
    first, second : str
        The hosts; equal inside a node.
    alpha : float
        Seconds of an empty message, one way.
    beta : float
        Seconds per byte.
    """

    first: str
    second: str
    alpha: float
    beta: float

    @property
    def inside(self) -> bool:
        """Whether both ranks share a node."""
        return self.first == self.second


def pairs_of(groups: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure: one in each node, then one for each pair of nodes.

    Of more than 8 nodes, only each with the next are pairs, and the last with the first.
    """
    inside = [(group[0], group[1]) for group in groups if len(group) > 1]
    first = [group[0] for group in groups]
    every = list(itertools.combinations(first, 2))
    if len(every) > MOST_PAIRS:
        every = [*zip(first, first[1:]), (first[-1], first[0])]
    return inside + every


def measure_links(comm: MeasuredGroup) -> tuple[list[LinkSpeed], Calibration]:
    """Measure α and β inside nodes and between them, and γ; collective.

    Returns
    -------
    list of LinkSpeed
        α and β of each pair of :func:`pairs_of`, in its order; the same on every rank.
    Calibration
        The medians of the pairs inside nodes, and of those between nodes, for the cost model; γ is
        that of the slowest rank.
    """
    hosts = comm.allgather_object(socket.gethostname())
    found = [
        LinkSpeed(hosts[a], hosts[b], *_speed(comm, a, b))
        for a, b in pairs_of(comm.topology.groups)
    ]
    inside = [link for link in found if link.inside] or found
    across = [link for link in found if not link.inside]
    gamma = float(comm.allreduce(add_cost(), op="max"))
    near = _medians(inside) if inside else (0.0, 0.0)
    far = Link(*_medians(across)) if across and inside != across else None
    return found, Calibration.straight(*near, gamma, far)


def _medians(links: list[LinkSpeed]) -> tuple[float, float]:
    return median([link.alpha for link in links]), median([link.beta for link in links])


def _speed(comm: MeasuredGroup, first: int, second: int) -> tuple[float, float]:
    """Return α and β between two ranks, on every rank."""
    small, large = (ping_pong(comm, second, n, TRIPS, first) for n in (SMALL, LARGE))
    figures = np.array([small, max(large - small, 0.0) / LARGE])
    alpha, beta = comm.broadcast(figures, root=first).tolist()
    return alpha, beta


VARIABLE = "MPIDIST_CALIBRATE"
SECONDS = 0.02  # for all pairs and lengths together, and for memory; with the rest below 50 ms
_SHORTER = 128 << 10  # bytes of the long message, where the time is short
_MOST_TRIPS = 50
_LAST = 1  # first byte of the message of the last round trip


def from_environment(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return the setting of ``MPIDIST_CALIBRATE``, which must be 0 or 1; None if it is unset."""
    return switch(VARIABLE, environ)


def calibrate_shortly(
    backend: Backend, groups: Groups, heap: Heap | None, deadline: float | None
) -> Calibration:
    """Measure α and β from rank 0 to a rank of its node and to one of another, and γ; collective.

    And the constants of `heap`, the memory that the ranks share, if they do.  Every rank gets rank
    0's measurements, and in shared memory the medians of all ranks.

    Past the `deadline` (a time of ``time.monotonic``; None for never) CollectiveTimeout is raised.
    """
    near, far = groups[0][1:2], groups[1][:1] if len(groups) > 1 else ()
    pairs = [*near, *far]
    share = SECONDS / max(2 * len(pairs), 1)  # of a short and of a long message
    rates = [_rates(backend, peer, share, deadline) for peer in pairs]
    gamma = add_cost(_SHORTER) if backend.rank == 0 else 0.0
    first = rates[0] if rates else (0.0, 0.0)
    across = rates[-1] if near and far else (-1.0, -1.0)
    figures = np.array([*first, gamma, *across])
    _broadcast(backend, figures, deadline)
    alpha, beta, gamma, far_alpha, far_beta = figures.tolist()
    link = Link(far_alpha, far_beta) if far_alpha >= 0 else None
    found = Calibration.straight(alpha, beta, gamma, link)
    if heap is None:
        return found
    mapped, published = _of_memory(backend, heap, gamma, deadline)
    return replace(found, mapped=mapped, published=published)


def _rates(
    backend: Backend, peer: int, share: float, deadline: float | None
) -> tuple[float, float]:
    """Return α and β between rank 0 and `peer`, by a short and a long message; on rank 0 only."""
    small = _ping_pong(backend, peer, SMALL, share, deadline)
    large = _ping_pong(backend, peer, _SHORTER, share, deadline)
    return small, max(large - small, 0.0) / _SHORTER


def _ping_pong(
    backend: Backend, peer: int, nbytes: int, share: float, deadline: float | None
) -> float:
    """Return the one-way time of a message of `nbytes` in seconds; valid on rank 0 only.

    Round trips are repeated for about `share` seconds; rank 0 marks the last one in the first byte
    of its message.
    """
    if backend.rank not in (0, peer):
        return 0.0
    data = np.zeros(nbytes, np.uint8)
    if backend.rank == peer:
        while not data[0]:
            _move(backend, backend.irecv, data, 0, deadline)
            _move(backend, backend.isend, data, 0, deadline)
        return 0.0
    times: list[float] = []
    begun = perf_counter()
    while not data[0]:
        # What a program sends it has just written: unchanged lines would travel in less time.
        data[1:] = len(times)
        before = perf_counter()
        if len(times) == _MOST_TRIPS or (len(times) > 1 and before - begun > share):
            data[0] = _LAST
        _move(backend, backend.isend, data, peer, deadline)
        _move(backend, backend.irecv, data, peer, deadline)
        times.append(perf_counter() - before)
    return low(times[1:]) / 2  # the first trip is a warm-up; other load only adds to the others


def _broadcast(backend: Backend, figures: np.ndarray, deadline: float | None) -> None:
    """Broadcast rank 0's measurements to all ranks, in place in `figures`."""
    if backend.rank:
        _move(backend, backend.irecv, figures, 0, deadline)
        return
    for peer in range(1, backend.size):
        _move(backend, backend.isend, figures, peer, deadline)


def _move(
    backend: Backend,
    post: Callable[..., object],
    data: np.ndarray,
    peer: int,
    deadline: float | None,
) -> None:
    request = post(data, peer, BLOCKING)
    if not backend.wait(request.test, deadline):  # type: ignore[attr-defined]
        raise CollectiveTimeout(
            f"rank {backend.rank}: calibrate: no message exchanged with rank {peer} in time",
            collective="calibrate",
        )


_STORED = 512 << 10  # bytes that a rank stores at a time, and another one reads
_MEETINGS, _PASSES, _LEAST = 20, 7, 3  # measurements: of a meeting, of all else, and if it is late
_CACHE = 32 << 20  # bytes, where the system does not say


def _of_memory(
    backend: Backend, heap: Heap, gamma: float, deadline: float | None
) -> tuple[Sharing | None, Sharing | None]:
    """Return the constants of memory that is mapped, and of that of other processes; collective.

    All ranks read at the same time, each in the memory of the next one, and so they store::

        store in mine | meet | read the next rank's (timed) | meet | store in mine | …

    For readings from beyond the caches mine is stored with streaming stores, which leave nothing in
    them: to allocate arrays longer than the caches would take 10 ms and more.
    """
    try:
        own = heap.empty((2 * _STORED + 1,), np.dtype(np.uint8))
    except MemoryError:
        return None, None
    location = heap.find(own)
    assert location is not None
    peer, views = (heap.rank + 1) % heap.size, location.views(own.size, own.dtype)
    mine, pushed = views[heap.rank][:_STORED], views[heap.rank][_STORED:-1]
    there, push = views[peer][:_STORED], views[peer][_STORED:-1]
    late = views[0][-1:]  # not 0 once rank 0 has used up the time
    scratch, meet = np.ones(_STORED, np.uint8), _meeting(backend, heap, deadline)
    writing, streaming = store(mine, scratch), stream(mine, scratch)
    reading, pushing = store(scratch, there), store(push, scratch)

    # To take turns belongs to the times of more ranks than cores; other programs' load does not.
    turns = [meet] if backend.crowded else []
    until = perf_counter() + SECONDS

    def usual(before: Sequence[Action], measured: Sequence[Action], most: int = _PASSES) -> float:
        """Return the usual seconds of what every rank does between two meetings."""
        times = []
        for _ in range(most):
            if heap.rank == 0 and perf_counter() > until:
                late[0] = 1
            _timed(before)
            meet()
            last = late[0]  # which rank 0 does not change before the next meeting
            times.append(_timed(measured))
            meet()
            if last and len(times) >= _LEAST:
                break
        return sorted(times)[len(times) // 4]  # on a busy machine half of them are the scheduler's

    def rate(before: Action, measured: Sequence[Action]) -> float:
        seconds = usual([before], [*measured, *turns])
        # A meeting that was measured on a busier machine must not make a rate 0, or less.
        return max(seconds - len(turns) * meeting, seconds / 2) / _STORED

    reading()  # maps the pages
    meet()
    row = [meet, *turns, *turns, *turns]
    meeting = usual([], row, _MEETINGS) / len(row)
    operands = [x.view(np.float32) for x in (pushed, there)]
    folding = fold_in_order(find_op("sum"), operands, (0, 1), operands[:1], 0)
    figures = [
        meeting / (heap.size - 1),  # here: nodes may have different numbers of ranks
        rate(writing, [reading]),
        rate(store(scratch, pushed), [pushing]),
        rate(writing, folding),
        rate(streaming, [reading]),
    ]
    try:
        memory = process_memory.connect(heap.rank, heap.ranks, heap.everyone)
    except Unsupported:
        pass
    else:
        there_at, target = heap.everyone(address(mine))[heap.ranks[peer]], address(scratch)
        call = partial(memory.read, heap.ranks[peer], there_at, target)
        fetching = [partial(call, _STORED)]
        figures += [rate(writing, fetching), rate(streaming, fetching)]
        figures.append(usual([], [partial(call, 1)]))
    # The ranks' medians: one that was interrupted must not speak for all.
    each, read, stored, folded, beyond, *rest = map(median, zip(*heap.everyone(figures)))
    cache = min(heap.everyone(_cache_bytes(heap.size)))
    mapped = Sharing.straight(each, read, stored, max(folded - read, 0.0), beyond, cache)
    if not rest:
        return mapped, None
    fetched, beyond, access = rest
    return mapped, Sharing.straight(each, fetched, fetched, gamma, beyond, cache, access)


def _meeting(backend: Backend, heap: Heap, deadline: float | None) -> Action:
    """Return the action that meets all ranks in the barrier of kernels."""
    heap.make_lines()
    barrier = Barrier(heap.lines, [0])

    def meet() -> None:
        barrier.start()
        if not backend.wait(barrier.test, deadline):  # type: ignore[attr-defined]
            missing = ", ".join(map(str, heap.missing()))
            raise CollectiveTimeout(
                f"rank {backend.rank}: calibrate: ranks {missing} have not come in time",
                collective="calibrate",
            )

    return meet


def _timed(actions: Sequence[Action]) -> float:
    begun = perf_counter()
    for action in actions:
        action()
    return perf_counter() - begun


def _cache_bytes(ranks: int, folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of a collective's data that stay in the last cache, of `ranks` of a node.

    Each rank has an input and a result, and shares the cache with the ranks on its processors.
    """
    size, sharing = _CACHE, ranks
    try:
        last = max(folder.glob("index*"), key=lambda path: path.name)
        size = parse_size((last / "size").read_text())
        words = (last / "shared_cpu_map").read_text().replace(",", "")
        sharing = -(-ranks * int(words, 16).bit_count() // (os.cpu_count() or 1))
    except (OSError, ValueError):  # no such file system, as in some containers
        pass
    return size // (2 * max(sharing, 1))


_TRIPS, _BATCHES = 32, 16  # round trips of a line in a row, and how often the best is sought
_TRIP_SECONDS = 0.01  # for all batches, where ranks wait for a core
_WORDS = 16  # from one line of this measurement to the next: neighbours may be fetched together
_PATIENCE = (2000, 50)  # looks and yields of a wait in compiled code
_SCHEDULED = 3e-6  # seconds of a round trip that is not a line's, but the scheduler's


class LineTrips:
    """Round trips of a cache line between rank 0 and the next rank of its node.

    The steps of kernels do both parts, and the counters of barriers are the words that travel::

        rank 0    MEET: a += 1, wait for b
        rank 1    MEET: c += 1, wait for a; MEET: b += 1      only rank 1 reads c

    A batch begins with one trip, for which rank 1 may be late, and one that says whether to go on;
    those that follow are timed.  ``deadline()`` returns the deadline (``time.monotonic``) of a wait
    that begins now.
    """

    def __init__(self, backend: Backend, heap: Heap, deadline: Callable[[], float | None]):
        self._backend, self._heap, self._deadline = backend, heap, deadline
        self._own = own = heap.empty((_WORDS * 3,), np.dtype(np.int64))
        self.takes_part = heap.ranks[0] == 0 and heap.rank < 2
        if not self.takes_part:
            return
        location = heap.find(own)
        assert location is not None
        self._peer = location.views(own.size, own.dtype)[1 - heap.rank]
        self._begin, self._batch = self._answers(1), self._answers(_TRIPS)

    def _answers(self, trips: int) -> Action:
        """Return the action that goes this rank's part of some round trips."""
        own, steps = self._own, Steps()
        words = memoryview(own)  # type: ignore[arg-type]
        there, patience = (address(self._peer) - address(own)) // own.itemsize, _PATIENCE
        for _ in range(trips):
            if self._heap.rank:
                steps.meet(WordAddresses(words, _WORDS, [there], patience), self._wait)
            others = [] if self._heap.rank else [there]
            steps.meet(WordAddresses(words, 0, others, patience), self._wait)
        return partial(steps.bind(), 0)

    def _wait(self, sequence: int) -> None:
        """Wait in Python for the other rank, which has not come in time."""
        own, peer, counter = self._own, self._peer, _WORDS * self._heap.rank

        def come() -> bool:
            return bool(peer[0] >= own[counter])

        if not self._backend.wait(come, self._deadline()):  # type: ignore[attr-defined]
            raise CollectiveTimeout(
                f"rank {self._backend.rank}: round trip of a line: no answer of rank "
                f"{self._heap.ranks[1 - self._heap.rank]} in time",
                collective="round_trip",
            )

    def seconds(self) -> float | None:
        """Return the seconds of the fastest round trip, the same on all ranks; collective.

        None if none was faster than the scheduler.
        """
        mine = self._measure() if self.takes_part else 0.0
        best = float(self._heap.everyone(mine)[0])
        return best if best < _SCHEDULED else None

    def _measure(self) -> float:
        """Return the seconds of a trip in the fastest batch; valid on rank 0 only."""
        first = self._heap.rank == 0
        last = (self._own if first else self._peer)[2 * _WORDS :]  # of rank 0: not 0 at the end
        if first:
            last[0] = 0
        best, until, batches = math.inf, perf_counter() + _TRIP_SECONDS, 0
        while True:
            if first and batches:
                done = batches >= _BATCHES and best < _SCHEDULED * _TRIPS
                last[0] = done or perf_counter() > until
            self._begin()
            if last[0]:
                return best / _TRIPS
            best = min(best, _timed([self._batch]))
            batches += 1
