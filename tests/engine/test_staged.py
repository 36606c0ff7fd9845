"""Schedules of private arrays, through slots and by single copies, run in one process."""

import numpy as np
import pytest

from mpidist.engine.single_copy import SingleCopy
from mpidist.engine.staged import Staged
from mpidist.schedule import Copy, Fold, Meet, algorithm, algorithms, prove
from mpidist.schedule.registry import unregister

from ..support.one_node import Ranks, check_bits, filled

MEMORIES = {"slots": Staged, "published": SingleCopy}
SCHEDULES = [
    (a.collective, a.name, a.memory.name)
    for a in algorithms(one_sided=True)
    if a.memory is not None and a.memory.name in MEMORIES and a.collective != "barrier"
    if "groups" not in a.uses
]


@pytest.mark.parametrize("size", (1, 2, 3, 5))
@pytest.mark.parametrize(("collective", "name", "memory"), SCHEDULES)
def test_same_bits_as_direct(collective, name, memory, size):
    def make(n, dtype):
        return [np.empty(n, dtype) for _ in range(size)]

    kinds = (("float32", "sum"), ("float64", "prod"))
    ranks = Ranks(size, MEMORIES[memory])
    check_bits(ranks, collective, name, make, (0, 1, 5, 1000, 40_000), kinds)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("collective", ("allreduce", "reduce", "broadcast"))
def test_in_place(memory, collective):
    ranks, xs = Ranks(3, MEMORIES[memory]), [np.empty(70_000) for _ in range(3)]
    op = None if collective == "broadcast" else "mean"
    for _ in range(2):
        filled(xs)
        kept = [x.copy() for x in xs]
        calls = ranks.calls(collective, xs, xs, 1, op)
        ranks.run(ranks.bound(memory, calls))
        right = kept[1] if op is None else np.mean(kept, axis=0)
        for call in calls:
            assert call.out is None or np.allclose(call.out, right)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_uneven_counts(memory, size, each=30_000):
    counts = [each * (3 * rank % 4) for rank in range(size)]
    ranks, total = Ranks(size, MEMORIES[memory]), sum(counts)
    for collective in ("allgather", "gather", "scatter", "reduce_scatter"):
        deals = collective in ("scatter", "reduce_scatter")
        long = [np.empty(total, "int32") for _ in range(size)]
        parts = [np.empty(count, "int32") for count in counts]
        filled(long)
        filled(parts)
        op = "sum" if collective == "reduce_scatter" else None
        xs, outs = (long, parts) if deals else (parts, long)
        wanted = [np.concatenate(parts)] * size
        if deals:
            whole = long[0].copy() if op is None else np.sum(long, axis=0, dtype="int32")
            wanted = np.split(whole, np.cumsum(counts)[:-1])
        calls = ranks.calls(collective, xs, outs, 0, op, counts)
        ranks.run(ranks.bound(memory, calls))
        for call, right in zip(calls, wanted):
            assert call.out is None or (call.out == right).all()


@pytest.mark.long
@pytest.mark.parametrize("size", (2, 5))
def test_slots_long_arrays_in_pieces(size):
    """Arrays longer than a slot, of even and uneven blocks."""

    def make(n, dtype):
        return [np.empty(n, dtype) for _ in range(size)]

    ranks = Ranks(size, Staged)
    for collective, name, memory in SCHEDULES:
        if memory == "slots" and not name.endswith("one_shot"):
            check_bits(ranks, collective, name, make, (600_011,), (("float32", "sum"),))
    test_uneven_counts("slots", size, each=900_000)


def test_slots_refused_arrays():
    ranks, n = Ranks(2, Staged), (2 << 20) + 1
    calls = ranks.calls("allreduce", [np.zeros(n, "int8")] * 2, [np.zeros(n, "int8")] * 2, op="sum")
    assert ranks.executors[0].why_not(calls[0], "auto", False) is None
    assert "bytes of a staging slot, which has 2 MiB" in ranks.why_not("slots_one_shot", calls)[0]
    x = np.zeros((16 << 20) + 1, "int8")
    calls = ranks.calls("broadcast", [x] * 2, [x] * 2)
    assert "16777217 bytes exceed 16 MiB" in ranks.executors[0].why_not(calls[0], "auto", False)
    assert ranks.why_not("slots", calls) == [None, None]


@pytest.mark.parametrize("collective", ("broadcast", "allgather", "alltoall"))
def test_slots_elements_longer_than_a_slot_are_refused(collective):
    """No piece is shorter than an element, so that more pieces do not help; others serve it."""
    ranks, dtype = Ranks(2, Staged), np.dtype([("image", "u1", 1_200_000), ("label", "i4")])
    whole = [np.zeros(4, dtype) for _ in range(2)]
    x = [np.zeros(2, dtype) for _ in range(2)] if collective == "allgather" else whole
    calls = ranks.calls(collective, x, whole)
    assert "bytes of a staging slot" in ranks.executors[0].why_not(calls[0], "auto", False)


def test_a_slot_that_is_filled_from_another():
    """Its blocks are as long as what the other holds, also where they hold each other's."""

    @algorithm("allreduce", "twice", memory="slots", ordered=True)
    def twice(rank, size):
        yield Copy(0, 0, target="slot0")
        yield Copy(0, 0, source="slot0", target="slot1")
        yield Copy(0, 0, source="slot1", target="slot0")
        yield Meet(range(size))
        yield Fold(range(size), source="slot1")

    try:
        for size in (1, 2, 3):
            prove("allreduce", "twice", size)
            xs, outs = ([np.arange(7.0) + r for r in range(size)] for _ in range(2))
            ranks = Ranks(size, Staged)
            ranks.run(ranks.bound("twice", ranks.calls("allreduce", xs, outs, op="sum")))
            assert all((out == sum(xs)).all() for out in outs)
    finally:
        unregister("allreduce", "twice")
