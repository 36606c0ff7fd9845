"""Schedules that measure the memory of a node, run by its executors like any algorithm.

They take turns with those of messages (:mod:`.probes`), after each rank has written its data::

    meet       all ranks meet: once, and many times
    get        every rank reads n bytes in the memory of the next one, between two meetings
    put        every rank stores them there
    fold       every rank reads them, and combines them with its own
    copy       every rank copies n bytes in its own memory, after a meeting

Slots are written before the meeting, and read after it: "put" copies into them, and precedes "get"
and "fold".  Memory of other processes has no "put".

What an access writes no rank reads, also where a call is in place, and all of it is the result: it
is the one of a reduce_scatter, of n bytes of the size * n of the input::

    rank 0    in [0] [1] [2]   out [0]        get of rank 0: block 0 of rank 1
    rank 1    in [0] [1] [2]   out [1]        put of rank 0: block 1 into "out" of rank 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ..calls.call import Call
from ..operations import find_op
from ..schedule.cost import Sharing
from ..schedule.memories import MEMORIES
from ..schedule.model import Curve, rising
from ..schedule.registry import Algorithm, Choice
from ..schedule.rounds import Copy, Fold, Get, Meet, Put, Round, Step
from .probes import Key

SIZES = (64, 4 << 10, 32 << 10, 256 << 10, 2 << 20)
"""Bytes of each access; those of meetings do not matter."""
NAMES = ("mapped", "slots", "published")
"""The memories that are measured, of :data:`~mpidist.schedule.memories.MEMORIES`."""

Make = Callable[[int, int], Iterator[Round]]


def _meet(rounds: int) -> Make:
    def schedule(rank: int, size: int) -> Iterator[Round]:
        for _ in range(rounds):
            yield Meet(range(size))

    return schedule


def _between(step: Callable[[int, int], Step]) -> Make:
    """Return the schedule of a step, of the rank and the next one, between two meetings."""

    def schedule(rank: int, size: int) -> Iterator[Round]:
        yield Meet(range(size))
        yield step(rank, (rank + 1) % size)
        yield Meet(range(size))

    return schedule


def _through_slots(step: Callable[[int, int], Step]) -> Make:
    """Return the schedule that copies into slots, and does a step once all have met."""

    def schedule(rank: int, size: int) -> Iterator[Round]:
        yield Copy((rank - 1) % size, 0, target="slot0")  # which the rank before gets
        yield Meet(range(size))
        yield step(rank, (rank + 1) % size)

    return schedule


def _deposit(rank: int, size: int) -> Iterator[Round]:
    yield Copy(range(size), range(size), target="slot0")
    yield Meet(range(size))


def _copy(rank: int, size: int) -> Iterator[Round]:
    yield Meet(range(size))
    yield Copy(rank, rank)


def _get(rank: int, peer: int) -> Step:
    return Get(peer, rank, "in")


def _put(rank: int, peer: int) -> Step:
    return Put(peer, peer, "in")


def _fold(rank: int, peer: int) -> Step:
    return Fold((rank, peer), rank)


_MANY = 17  # meetings: of 3 the time was now and then less than that of one
_MEETINGS = {"meet": _meet(1), f"meet {_MANY}": _meet(_MANY)}
_BETWEEN = {"get": _between(_get), "fold": _between(_fold), "copy": _copy}
_SCHEDULES: dict[str, dict[str, Make]] = {
    "mapped": {**_MEETINGS, **_BETWEEN, "put": _between(_put)},
    "slots": {
        **_MEETINGS,
        "put": _deposit,
        "get": _through_slots(lambda rank, peer: Get(peer, 0, "slot0", to=rank)),
        "fold": _through_slots(
            lambda rank, peer: Fold((rank, peer), 0, "slot0", to=rank, own="in")
        ),
        "copy": _copy,
    },
    "published": {**_MEETINGS, **_BETWEEN},
}
_WITHOUT_RESULT = ("mapped meet", "slots meet", "published meet", "slots put")


def _collective(probe: str) -> str:
    """Return the collective of a probe; if it makes no result, one in which that is the input."""
    return "allreduce" if probe.removesuffix(f" {_MANY}") in _WITHOUT_RESULT else "reduce_scatter"


def choice_of(probe: str) -> Choice:
    """Return the schedule of a probe, which is in no list of algorithms: its result is nothing."""
    memory, _, name = probe.partition(" ")
    make, known = _SCHEDULES[memory][name], MEMORIES[memory]
    label = f"probe of {memory} {name.removesuffix(' 3')}"
    return Choice(Algorithm(_collective(probe), label, make, lambda size, _: size, memory=known))


def calls_of(
    memory: str, rank: int, size: int, empty: Callable[[tuple[int]], np.ndarray]
) -> dict[Key, Call]:
    """Return the call of each probe of each size in a memory; a probe's name begins with its.

    ``empty((nbytes,))`` allocates an array of bytes that the ranks of the memory reach; it is
    collective if that is mapped.
    """
    found: dict[Key, Call] = {}
    op, dtype = find_op("sum"), np.dtype(np.float32)
    where = rank, size, 0, dtype
    whole, result = empty((size * max(SIZES),)), empty((max(SIZES),))
    for nbytes in SIZES:
        out, x = result[:nbytes].view(dtype), whole[: size * nbytes].view(dtype)
        short, counts = whole[:nbytes].view(dtype), (nbytes // dtype.itemsize,) * size
        for name in _SCHEDULES[memory]:
            if name in _MEETINGS and nbytes != SIZES[0]:
                continue
            probe = f"{memory} {name}"
            if _collective(probe) == "allreduce":
                call = Call("allreduce", *where, short, short, op, in_place=True)
            else:
                call = Call("reduce_scatter", *where, x, out, op, counts, counts)
            found[probe, nbytes] = call
    return found


def fit(memory: str, seconds: Mapping[Key, float], size: int, front: float) -> Sharing:
    """Return the model of a memory of `size` ranks that the times of its probes make.

    `front` are the seconds of a user's call before and after the run of what it is bound to.
    """
    once, often = (seconds[f"{memory} {name}", SIZES[0]] for name in _MEETINGS)
    meeting = max((often - once) / (_MANY - 1), 0.0)

    def of(name: str) -> np.ndarray:
        # An outlier would be in every difference with the probe.
        return np.array(rising([seconds[f"{memory} {name}", nbytes] for nbytes in SIZES]))

    def curve(values: np.ndarray) -> Curve:
        return Curve.through(SIZES, values.tolist())

    none = Curve.line(0.0, 0.0)
    if memory == "slots":
        before, stored = of("put"), curve(of("put") - once)
    else:
        before = np.full(len(SIZES), once + meeting)
        stored = curve(of("put") - before) if memory == "mapped" else none
    return Sharing(
        meeting=meeting / (size - 1),
        read=curve(of("get") - before),
        store=stored,
        fold=curve(of("fold") - before),
        copy=curve(of("copy") - once),
        call=max(once - meeting, 0.0) + front,
    )
