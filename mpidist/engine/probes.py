"""Schedules that measure a machine's messages, run by the engine like any algorithm.

What a program sends it has just written.  So each rank writes its data before each run: lines that
stayed as they were, shared by both ranks, would travel in a third of the time.  All probes of all
sizes take turns, in another order in each pass, and of each the low times count::

    shift      every rank sends n bytes to the next one: once, and three times
    ping       rank 0 sends n bytes to rank 1: once, and there and back and there
    fold       a shift whose receiver combines: in place, and apart; the data shifted, then copied
    pair       a ping in two messages
    strands    a shift in two strands
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..calls.call import Call
from ..operations import find_op
from ..schedule.model import Curve, Messages, rising
from ..schedule.registry import Algorithm, Choice
from ..schedule.rounds import Recv, Reduce, Round, Send, parallel

SIZES = (8, 1 << 10, *(4 << (10 + k) for k in range(10)), 16 << 20)
"""Bytes of the messages of a full measurement; between two of them time is taken to be linear."""
LONG = 2 << 20
"""Bytes beyond which messages are measured in few passes, and on one node only."""


def _shift(rounds: int) -> Callable[[int, int], Iterator[Round]]:
    def schedule(rank: int, size: int) -> Iterator[Round]:
        right, left, every = (rank + 1) % size, (rank - 1) % size, range(size)
        there, here = "out", "tmp"
        for _ in range(rounds):
            yield Send(right, every, there), Recv(left, every, here)
            there, here = here, there

    return schedule


def _ping(rounds: int) -> Callable[[int, int], Iterator[Round]]:
    def schedule(rank: int, size: int) -> Iterator[Round]:
        if rank < 2:
            for k in range(rounds):
                yield Send(1 - rank, range(size)) if rank == k % 2 else Recv(1 - rank, range(size))

    return schedule


def _fold(rank: int, size: int) -> Iterator[Round]:
    yield Send((rank + 1) % size, range(size)), Reduce((rank - 1) % size, range(size))


def _pair(rank: int, size: int) -> Iterator[Round]:
    if rank == 0:
        yield Send(1, 0), Send(1, range(1, size))
    elif rank == 1:
        yield Recv(0, 0), Recv(0, range(1, size))


def _strands(rank: int, size: int) -> Iterator[Round]:
    right, left = (rank + 1) % size, (rank - 1) % size

    def strand(blocks: range) -> Iterator[Round]:
        yield Send(right, blocks), Recv(left, blocks, "tmp")

    yield parallel(strand(range(1)), strand(range(1, size)))


# By name: the schedule, whether its result is apart from the input, whether it is of all sizes.
_PROBES: dict[str, tuple[Callable[[int, int], Iterator[Round]], bool, bool]] = {
    "shift": (_shift(1), False, True),
    "shift 3": (_shift(3), False, True),
    "shift apart": (_shift(1), True, True),
    "ping": (_ping(1), False, True),
    "ping 3": (_ping(3), False, True),
    "fold": (_fold, False, True),
    "fold apart": (_fold, True, True),
    "pair": (_pair, False, False),
    "strands": (_strands, False, True),
}

Key = tuple[str, int]  # a probe and its bytes


def choice_of(name: str) -> Choice:
    """Return the schedule of a probe, which is in no list of algorithms: its result is nothing."""
    label, function = f"probe of {name.partition(' ')[0]}", _PROBES[name][0]
    return Choice(Algorithm("allreduce", label, function, lambda size, known: size))


def calls_of(rank: int, size: int, sizes: Sequence[int]) -> dict[Key, Call]:
    """Return the call of each probe of each size, with arrays of its own."""
    found, op, dtype = {}, find_op("sum"), np.dtype(np.float32)
    for nbytes in sizes:
        x, other = (np.zeros(max(nbytes // 4, size), dtype) for _ in range(2))
        for name, (_, apart, always) in _PROBES.items():
            if always or nbytes == sizes[0]:
                out = other if apart else x
                call = Call("allreduce", rank, size, 0, dtype, x, out, op, in_place=not apart)
                found[name, nbytes] = call
    return found


def fit(seconds: Mapping[Key, float], front: float, call: float | None = None) -> Messages:
    """Return the model of messages that the times of probes make.

    Other times in `seconds` do not matter.  `front` are the seconds of a user's call before and
    after the run of what it is bound to; `call` those of a call beside its rounds, `front` among
    them, if other probes have told them.
    """
    sizes = sorted({nbytes for name, nbytes in seconds if name in _PROBES})
    small = sizes[0]

    def of(name: str) -> np.ndarray:
        # An outlier would be in every difference with the probe.
        return np.array(rising([seconds[name, nbytes] for nbytes in sizes]))

    def curve(values: np.ndarray) -> Curve:
        return Curve.through(sizes, values.tolist())

    again, back = (of("shift 3") - of("shift")) / 2, (of("ping 3") - of("ping")) / 2
    if call is None:
        call = front + max(float(of("shift")[0] - again[0]), 0.0)
    own = max(call - front, 0.0)
    further = max(seconds["pair", small] - seconds["ping", small], 0.0)
    # Without what strands cost, the second half waits for the port, not for the first's latency.
    both = curve(of("shift") - own)
    overlap = max(both.at(0) - further, 0.0)
    halves = np.array([own + 2 * both.at(nbytes / 2) - overlap for nbytes in sizes])
    strand = Curve.through([n // 2 for n in sizes], ((of("strands") - halves) / 2).tolist())
    return Messages(
        call=call,
        strand=strand,
        further=further,
        one_way=curve(of("ping") - own),
        both_ways=both,
        one_way_written=curve(back),
        both_ways_written=curve(again),
        combine=curve(of("fold") - of("shift")),
        combine_apart=curve(of("fold apart") - of("shift")),
        copy=curve(of("shift apart") - of("shift")),
    )
