"""Schedules of private arrays, through slots and by single copies, run in one process."""

import numpy as np
import pytest

from mpidist.engine.single_copy import SingleCopy
from mpidist.engine.staged import Staged
from mpidist.schedule import algorithms
from mpidist.schedule.registry import find

from ..support.one_node import ROOTED, Ranks, expected, filled, lengths

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
    """Twice, in different orders of the ranks: the same bits as ``direct``, and `x` unchanged."""
    ranks = Ranks(size, MEMORIES[memory])
    reduces = find(collective, name).algorithm.contract.reduces
    for n in (0, 1, 5, 1000, 40_000):
        for dtype, op in (("float32", "sum"), ("float64", "prod")):
            for root in sorted({0, size - 1}) if collective in ROOTED else (0,):
                long, result = lengths(collective, n, size)
                xs, outs = ([np.empty(k, dtype) for _ in range(size)] for k in (long, result))
                filled(xs)
                kept = [x.copy() for x in xs]
                wanted = expected(collective, kept, root, op if reduces else None)
                calls = ranks.calls(collective, xs, outs, root, op if reduces else None)
                programs = ranks.bound(name, calls)
                for seed in range(2):
                    for out in outs:
                        out[...] = 77
                    ranks.run(programs, seed)
                    assert [x.tobytes() for x in xs] == [x.tobytes() for x in kept]
                    for call, right in zip(calls, wanted):
                        assert (
                            right is None
                            or call.out is None
                            or call.out.tobytes() == right.tobytes()
                        )


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
def test_uneven_counts(memory, size):
    counts = [30_000 * (3 * rank % 4) for rank in range(size)]
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


def test_a_slot_is_too_short():
    ranks, n = Ranks(2, Staged), (2 << 20) + 1
    calls = ranks.calls("allreduce", [np.zeros(n, "int8")] * 2, [np.zeros(n, "int8")] * 2, op="sum")
    assert "2097153 bytes exceed the 2 MiB" in ranks.executors[0].why_not(calls[0], "auto", False)
    assert "bytes of a staging slot, which has 2 MiB" in ranks.why_not("slots", calls)[0]
