"""Schedules that measure a machine's messages, run by the engine like any algorithm.

What a program sends it has just written.  So each rank writes its data before each run: lines that
stayed as they were, shared by both ranks, would travel in a third of the time.  All probes of all
sizes take turns, in another order in each pass, and of each the low times count::

    shift      every rank sends n bytes to the next one: once, and three times
    ping       rank 0 sends n bytes to rank 1: once, and there and back and there
    fold       a shift whose receiver combines: in place, and apart; the data shifted, then copied
    pair       a ping in two messages: of one round, and of two
    strands    a shift in two strands
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

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

_WHOLE = range(2)  # the blocks of the data, which are two halves


def _shift(rounds: int) -> Callable[[int, int], Iterator[Round]]:
    def schedule(rank: int, size: int) -> Iterator[Round]:
        right, left = (rank + 1) % size, (rank - 1) % size
        there, here = "out", "tmp"
        for _ in range(rounds):
            yield Send(right, _WHOLE, there), Recv(left, _WHOLE, here)
            there, here = here, there

    return schedule


def _ping(rounds: int) -> Callable[[int, int], Iterator[Round]]:
    def schedule(rank: int, size: int) -> Iterator[Round]:
        if rank < 2:
            for k in range(rounds):
                yield Send(1 - rank, _WHOLE) if rank == k % 2 else Recv(1 - rank, _WHOLE)

    return schedule


def _fold(rank: int, size: int) -> Iterator[Round]:
    yield Send((rank + 1) % size, _WHOLE), Reduce((rank - 1) % size, _WHOLE)


def _pair(together: bool) -> Callable[[int, int], Iterator[Round]]:
    def schedule(rank: int, size: int) -> Iterator[Round]:
        if rank < 2:
            step = Recv if rank else Send
            both = step(1 - rank, 0), step(1 - rank, 1)
            yield from [both] if together else both

    return schedule


def _strands(rank: int, size: int) -> Iterator[Round]:
    right, left = (rank + 1) % size, (rank - 1) % size

    def strand(half: int) -> Iterator[Round]:
        yield Send(right, half), Recv(left, half, "tmp")

    yield parallel(strand(0), strand(1))


# By name: the schedule, and whether its result is apart from the input.
_PROBES: dict[str, tuple[Callable[[int, int], Iterator[Round]], bool]] = {
    "shift": (_shift(1), False),
    "shift 3": (_shift(3), False),
    "shift apart": (_shift(1), True),
    "ping": (_ping(1), False),
    "ping 3": (_ping(3), False),
    "fold": (_fold, False),
    "fold apart": (_fold, True),
    "pair": (_pair(True), False),
    "pair onward": (_pair(False), False),
    "strands": (_strands, False),
}

Key = tuple[str, int]  # a probe and its bytes


def choice_of(name: str) -> Choice:
    """Return the schedule of a probe, which is in no list of algorithms: its result is nothing."""
    label, function = f"probe of {name.partition(' ')[0]}", _PROBES[name][0]
    return Choice(Algorithm("allreduce", label, function, lambda size, known: len(_WHOLE)))


def calls_of(rank: int, size: int, sizes: Sequence[int]) -> dict[Key, Call]:
    """Return the call of each probe of each size, with arrays of its own."""
    found, op, dtype = {}, find_op("sum"), np.dtype(np.float32)
    for nbytes in sizes:
        x, other = (np.zeros(max(nbytes // 4, len(_WHOLE)), dtype) for _ in range(2))
        for name, (_, apart) in _PROBES.items():
            out = other if apart else x
            call = Call("allreduce", rank, size, 0, dtype, x, out, op, in_place=not apart)
            found[name, nbytes] = call
    return found


def fit(
    seconds: Mapping[Key, float], front: float, call: float | None = None, occupies: bool = True
) -> Messages:
    """Return the model of messages that the times of probes make.

    Other times in `seconds` do not matter.  `front` are the seconds of a user's call before and
    after the run of what it is bound to; `call` those of a call beside its rounds, `front` among
    them, if other probes have told them.  `occupies` is that of :class:`Messages`.
    """
    sizes = sorted({nbytes for name, nbytes in seconds if name in _PROBES})
    halves = [n // 2 for n in sizes]

    def of(name: str) -> np.ndarray:
        # An outlier would be in every difference with the probe.
        return np.array(rising([seconds[name, nbytes] for nbytes in sizes]))

    def curve(values: np.ndarray) -> Curve:
        return Curve.through(sizes, values.tolist())

    again, back = (of("shift 3") - of("shift")) / 2, (of("ping 3") - of("ping")) / 2
    if call is None:
        call = front + max(float(of("shift")[0] - again[0]), 0.0)
    own = max(call - front, 0.0)
    one_way, both_ways = curve(of("ping") - own), curve(of("shift") - own)

    def second(name: str) -> Curve:
        """Return what the second half adds to the first."""
        first = np.array([own + one_way.at(n) for n in halves])
        return Curve.through(halves, (of(name) - first).tolist())

    found = Messages(
        call=call,
        strand=Curve.line(0.0, 0.0),
        further=second("pair"),
        onward=second("pair onward"),
        one_way=one_way,
        both_ways=both_ways,
        one_way_written=curve(back),
        both_ways_written=curve(again),
        combine=curve(of("fold") - of("shift")),
        combine_apart=curve(of("fold apart") - of("shift")),
        copy=curve(of("shift apart") - of("shift")),
        occupies=occupies,
    )
    # Without what strands cost, the second half waits for the port, not for the first's latency.
    free = [sum(found.message(n, True, False)[:2]) for n in halves]
    strands = (of("strands") - own - np.array(free)) / 2
    return replace(found, strand=Curve.through(halves, strands.tolist()))
