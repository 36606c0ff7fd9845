"""Schedules bound to symmetric memory, run in one process."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist import InvalidArgument, ScheduleError
from mpidist.algorithms.in_place import allreduce_in_place
from mpidist.calls.arrays import owner
from mpidist.calls.call import Caller
from mpidist.communicator.explain import example_call
from mpidist.engine.rooted import rooted_program
from mpidist.engine.symmetric import Symmetric
from mpidist.operations import find_op
from mpidist.schedule import Copy, Fold, Get, Meet, Put, algorithm, algorithms, on, parallel, prove
from mpidist.schedule.registry import find, unregister
from mpidist.selection.rules import RULES, Place

from ..support.one_node import (
    Ranks,
    assert_bits,
    check_bits,
    expected,
    filled,
    host_of,
    lengths,
)

SHIPPED = [
    (a.collective, a.name)
    for a in algorithms(one_sided=True)
    if a.memory is not None and a.memory.name == "mapped" and a.name.startswith("in_place")
]
WITH_DATA = [pair for pair in SHIPPED if pair[0] != "barrier"]


@pytest.mark.parametrize("size", (1, 2, 3, 4, 7))
@pytest.mark.parametrize(("collective", "name"), WITH_DATA)
def test_shipped_schedules(collective, name, size):
    ranks, kinds = Ranks(size), (("float32", "sum"), ("int32", "max"), ("float64", "prod"))
    check_bits(ranks, collective, name, ranks.empty, (0, 1, 5, 1000), kinds)


@pytest.mark.parametrize(("collective", "name"), WITH_DATA)
def test_streaming_stores(collective, name, monkeypatch):
    """They pass the cache and not the meaning; also in place, where they are not used."""
    monkeypatch.setenv("MPIDIST_STREAM_BYTES", "1")
    ranks, (long, result) = Ranks(3), lengths(collective, 999, 3)
    op = "sum" if find(collective, name).algorithm.contract.reduces else None
    xs, outs = ranks.empty(long, "float32"), ranks.empty(result, "float32")
    for place in (outs, xs) if collective in ("allreduce", "reduce", "broadcast") else (outs,):
        filled(xs)
        right = expected(collective, [x.copy() for x in xs], 1, op)
        calls = ranks.calls(collective, xs, place, 1, op)
        ranks.run(ranks.bound(name, calls))
        assert_bits(calls, right)


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_uneven_counts(size):
    counts = [3 * rank % 4 for rank in range(size)]
    ranks, total = Ranks(size), sum(counts)
    for collective in ("allgather", "gather", "scatter", "reduce_scatter"):
        deals = collective in ("scatter", "reduce_scatter")
        long, short = ranks.empty(total, "int32"), ranks.empty(max(counts), "int32")
        filled(long)
        filled(short)
        parts = [part[:count] for part, count in zip(short, counts)]
        op = "sum" if collective == "reduce_scatter" else None
        xs, outs = (long, parts) if deals else (parts, long)
        cuts = np.cumsum(counts)[:-1]
        wanted = [np.concatenate(parts)] * size
        if deals:
            wanted = np.split(long[0] if op is None else np.sum(long, axis=0, dtype="int32"), cuts)
        calls = ranks.calls(collective, xs, outs, 0, op, counts)
        ranks.run(ranks.bound("in_place", calls))
        for call, right in zip(calls, wanted):
            assert call.out is None or (call.out == right).all()


# -- the root's array out of reach ----------------------------------------------------------------


HALVES = (
    ("reduce", "in_place_fetched"),
    ("reduce", "in_place_one_shot"),
    ("gather", "in_place_fetched"),
    ("scatter", "in_place_stored"),
)


@pytest.mark.parametrize(("collective", "other"), HALVES)
@pytest.mark.parametrize("how", ("reached", "private", "dropped by some"))
def test_two_schedules_of_which_each_rank_takes_one(collective, other, how):
    op = "sum" if collective == "reduce" else None
    for size, root, n in product((1, 2, 3, 5), (0, 1), (0, 1, 5, 1000)):
        if root >= size:
            continue
        ranks, (long, result) = Ranks(size), lengths(collective, n, size)
        xs, outs = ranks.empty(long, "int32"), ranks.empty(result, "int32")
        number = ranks.number - (collective == "scatter")  # of the allocation with the root's array
        if how == "private" and collective == "scatter":
            xs = [x.copy() for x in xs]
        elif how == "private":
            outs = [out.copy() for out in outs]
        filled(xs)
        right = expected(collective, xs, root, op)
        calls = ranks.calls(collective, xs, outs, root, op)
        programs = []
        for call, executor, heap in zip(calls, ranks.executors, ranks.heaps):
            tags = [0]
            plans = [executor.plan(call, find(collective, name)) for name in ("in_place", other)]
            bound = [executor.binding(plan, call, tags) for plan in plans]
            last = collective != "reduce" or other == "in_place_one_shot"
            programs.append(rooted_program(call, *bound, heap, tags, last))
        if how == "dropped by some":
            for rank in range(1 - root, size, 2):
                del ranks.heaps[rank]._by_number[number]
        for turn in range(2):
            for out in outs:
                out[...] = 77
            ranks.run(programs, turn)
            for call, wanted in zip(calls, right):
                assert call.out is None or (call.out == wanted).all()


# -- a user's own schedules -----------------------------------------------------------------------


def fetched(rank, size):
    """The owners combine beside their arrays, and the others fetch."""
    yield Meet(range(size))
    yield Fold(range(size), blocks=rank, target="tmp")
    yield Meet(range(size))
    others = (Get(r, blocks=r, source="tmp") for r in range(size) if r != rank)
    yield Copy(rank, rank, source="tmp"), *others
    yield Meet(range(size))


def by_pairs(rank, size):
    """Pairs combine beside their arrays; only even ranks are in the second meeting."""
    every, even = range(size), range(0, size, 2)
    yield Meet(every)
    if rank in even:
        yield Fold(range(rank, min(rank + 2, size)), blocks=range(2), target="tmp")
        yield Meet(even)
    if rank == 0:
        yield Fold(even, blocks=(0, 1), source="tmp")
    yield Meet(every, awaits=() if rank == 0 else (0,))
    if rank:
        yield Get(0, blocks=range(2))
    yield Meet(every, awaits=None if rank == 0 else ())


def side_by_side(rank, size):
    """Half of the blocks with the ranks in reverse order."""
    mirrored = on(range(size - 1, -1, -1), allreduce_in_place(size - 1 - rank, size), size.__add__)
    yield parallel(allreduce_in_place(rank, size), mirrored)


def stored_thrice(rank, size):
    """A result that is put, copied on, and read again after the meeting."""
    others = [peer for peer in range(size) if peer != rank]
    yield Meet(range(size))
    yield Fold((rank, *others), blocks=rank, target="tmp")
    yield tuple(Put(peer, blocks=rank, source="tmp") for peer in others)
    yield Meet(range(size))
    yield Copy(rank, rank, source="tmp")


OWN = {
    "fetched": (fetched, lambda size: size),
    "by_pairs": (by_pairs, 2),
    "side_by_side": (side_by_side, lambda size: 2 * size),
    "stored_thrice": (stored_thrice, lambda size: size),
}


@pytest.fixture(params=OWN)
def own(request):
    function, count = OWN[request.param]
    algorithm("allreduce", request.param, blocks=count, memory="mapped")(function)
    yield request.param
    unregister("allreduce", request.param)


@pytest.mark.parametrize("size", (1, 2, 3, 4, 8))
def test_own_schedules(own, size):
    prove("allreduce", own, size)
    ranks = Ranks(size)
    for n in (0, 1, 5, 1000):
        for op, function in (("sum", np.sum), ("mean", np.mean), ("max", np.max)):
            for how in ("apart", "in place", "private"):
                outs = ranks.empty(n)
                xs = {"apart": ranks.empty(n), "in place": outs}.get(how) or [
                    np.empty(n) for _ in outs
                ]
                filled(xs)
                right = function(xs, axis=0)
                programs = ranks.bound(own, ranks.calls("allreduce", xs, outs, op=op))
                ranks.run(programs, n)
                for out in outs:
                    np.testing.assert_allclose(out, right, atol=1e-13)


def test_blocks_that_change_places():
    """Copies between blocks that overlap: all are read before one is written."""

    @algorithm("allreduce", "turned", blocks=lambda size: size, equal_blocks=True, memory="mapped")
    def turned(rank, size):
        every, moved = range(size), (*range(1, size), 0)
        yield Meet(every)
        yield Fold(every, blocks=every, target="tmp")
        yield Copy(every, moved, "tmp", "tmp")
        yield Meet(every)
        yield Copy(moved, every, "tmp", "out")

    try:
        prove("allreduce", "turned", 3)
        ranks = Ranks(3)
        xs, outs = ranks.empty(12), ranks.empty(12)
        filled(xs)
        ranks.run(ranks.bound("turned", ranks.calls("allreduce", xs, outs, op="max")))
        assert all((out == np.max(xs, axis=0)).all() for out in outs)
    finally:
        unregister("allreduce", "turned")


def test_copies_that_follow_each_other():
    """Each block is the next one's source: neighbours, but not one copy."""

    @algorithm("broadcast", "handed_on", blocks=3, equal_blocks=True, memory="mapped")
    def handed_on(rank, size, *, root):
        if rank == root:
            yield Copy(0, 0, "in", "tmp")
        yield Meet(range(size))
        if rank != root:
            yield Get(root, 0, "tmp", "tmp")
            yield Copy(0, 1, "tmp", "tmp")
            yield Copy(1, 2, "tmp", "tmp")
            yield Copy(range(3), range(3), "tmp", "out")
        yield Meet(range(size))

    try:
        ranks = Ranks(2)
        xs, outs = ranks.empty(12), ranks.empty(12)
        filled(xs)
        ranks.run(ranks.bound("handed_on", ranks.calls("broadcast", xs, outs)))
        assert (outs[1] == np.tile(xs[0][:4], 3)).all()
    finally:
        unregister("broadcast", "handed_on")


def test_a_result_is_stored_only_where_it_is_read():
    """What is combined into "tmp" and copied on from there is not stored in "tmp"."""

    @algorithm("allreduce", "copied_on", blocks=2, memory="mapped")
    def copied_on(rank, size):
        yield Meet(range(size))
        yield Fold(range(size), blocks=rank, target="tmp")
        yield Put(1 - rank, rank, "tmp"), Copy(rank, rank, "tmp")
        yield Meet(range(size))

    try:
        prove("allreduce", "copied_on", 2)
        ranks = Ranks(2)
        xs, outs = ranks.empty(10), ranks.empty(10)
        filled(xs)
        calls = ranks.calls("allreduce", xs, outs, op="sum")
        ranks.run(ranks.bound("copied_on", calls))
        assert all((out == np.sum(xs, axis=0)).all() for out in outs)
        schedule = ranks.executors[0].plan(calls[0], find("allreduce", "copied_on"))
        ((step,),) = [steps for steps in schedule.layout(calls[0]).steps if steps]
        assert [key for key, _, _ in step.targets] == [(1, "out"), (0, "out")]
    finally:
        unregister("allreduce", "copied_on")


def test_pieces_of_a_result_for_others_share_their_scratch():
    ranks = Ranks(2)
    xs, outs = ranks.empty(1 << 19, "float16"), ranks.empty(1 << 19, "float16")
    filled(xs)
    program, other = ranks.bound("in_place", ranks.calls("allreduce", xs, outs, op="prod"))
    done = [one for item in program.items for one in item.after]
    arrays = [part for one in done for part in getattr(one, "args", ()) if hasattr(part, "base")]
    assert len(done) > 8
    assert len({id(owner(part)) for part in arrays if part.dtype == np.float32}) <= 2
    ranks.run([program, other])
    assert all((out == xs[0] * xs[1]).all() for out in outs)


@pytest.mark.parametrize("size", (1, 2, 3, 6))
def test_own_scan(size):
    @algorithm("scan", "looked_back", ordered=True, memory="mapped")
    def looked_back(rank, size):
        """Every rank combines the inputs of all ranks up to itself."""
        yield Meet(range(size))
        yield Fold(range(rank, -1, -1), target="tmp")
        yield Meet(range(size))
        yield Copy(0, 0, source="tmp")

    try:
        prove("scan", "looked_back", size)
        ranks = Ranks(size)
        for xs in (ranks.empty(100), [np.empty(100) for _ in range(size)]):
            outs = ranks.empty(100)
            filled(xs)
            ranks.run(ranks.bound("looked_back", ranks.calls("scan", xs, outs, op="sum")))
            for rank, out in enumerate(outs):
                np.testing.assert_allclose(out, np.sum(xs[: rank + 1], axis=0), atol=1e-13)
    finally:
        unregister("scan", "looked_back")


def test_a_root_array_that_moves():
    """The other ranks are bound once, and find it where the root's notes say."""
    ranks = Ranks(3)
    xs, outs = ranks.empty(4), [ranks.empty(12), ranks.empty(12)]
    bound = [ranks.bound("in_place", ranks.calls("gather", xs, out)) for out in outs]
    for turn, at in enumerate((0, 1, 1, 0, 0)):
        for rank, x in enumerate(xs):
            x[...] = 10 * turn + rank
        outs[0][0][...] = outs[1][0][...] = -1
        ranks.run([bound[at][0], *bound[0][1:]])
        assert (outs[at][0] == np.concatenate(xs)).all() and (outs[1 - at][0] == -1).all()


def test_a_root_array_that_another_rank_has_dropped():
    ranks = Ranks(2)
    xs, outs = ranks.empty(4), ranks.empty(8)
    programs = ranks.bound("in_place", ranks.calls("gather", xs, outs))
    del ranks.heaps[1]._by_number[ranks.number]
    with pytest.raises(InvalidArgument, match="rank 1: out of rank 0 is in an array of comm.empty"):
        ranks.run(programs)


# -- what cannot be -------------------------------------------------------------------------------


def test_reasons():
    ranks, private = Ranks(2), [np.empty(10), np.empty(10)]
    shared = ranks.empty(10)
    refused = "was not allocated by comm.empty()"
    for collective, name, xs, outs, why in (
        ("allreduce", "in_place", shared, private, [f"out {refused}"] * 2),
        ("allreduce", "in_place", private, shared, [None] * 2),
        ("reduce", "in_place", private, shared, [f"x {refused}"] * 2),
        ("reduce", "in_place", shared, private, [f"out {refused}", None]),
        ("gather", "in_place", private, [np.empty(20)] * 2, [f"out {refused}", None]),
        ("gather", "in_place_fetched", private, [np.empty(20)] * 2, [None, f"x {refused}"]),
    ):
        op = "sum" if "reduce" in collective else None
        assert ranks.why_not(name, ranks.calls(collective, xs, outs, op=op)) == why


def test_what_ranks_know_of_each_other():
    """Not whether the root's result is symmetric, or the other array of a call."""
    ranks = Ranks(3)
    for collective, name, wanted in (
        ("reduce", "in_place", "out"),
        ("reduce", "in_place_fetched", None),
        ("gather", "in_place", "out"),
        ("gather", "in_place_fetched", None),
        ("scatter", "in_place", "x"),
        ("scatter", "in_place_stored", None),
        ("allreduce", "in_place", None),
        ("alltoall", "in_place", None),
    ):
        op = "sum" if "reduce" in collective else None
        outs = [np.empty(30) if collective == "gather" else np.empty(10)] * 3
        xs = [np.empty(30) if collective == "scatter" else np.empty(10)] * 3
        if collective == "alltoall":
            xs = outs = [np.empty(30)] * 3
        for executor, call in zip(ranks.executors, ranks.calls(collective, xs, outs, op=op)):
            why = executor.unknown(call, find(collective, name), False)
            assert why is None if wanted is None else f"whether its {wanted} is" in why


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 1, 2), (3, 4)), ((0, 1), (2,))])
def test_ranks_know_what_the_rules_between_nodes_need(groups):
    caller = Caller(0, sum(map(len, groups)))
    place, found = Place(caller.size, len(groups)), set()
    host = replace(host_of(SimpleNamespace(rank=0, size=caller.size), None), groups=groups)
    for collective, rules in RULES.items():
        call = example_call(caller, collective, 4 << 20, find_op("sum"))
        for name in [rule.choose for rule in rules if "in_place" in rule.choose and rule.at(place)]:
            choice = find(collective, name)
            if choice.algorithm.unsupported(caller.size, groups=groups) is None:
                assert Symmetric(host).unknown(call, choice, False) is None
                found.add(collective)
    assert found == {"allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"}


def test_scratch_memory_is_beside_the_array_that_all_ranks_have():
    """The result of an alltoall may be at another place on each rank."""

    @algorithm("alltoall", "own", memory="mapped")
    def own(rank, size):
        yield Copy(range(size), range(size), target="tmp")
        yield Meet(range(size))
        yield Copy(rank, rank, "tmp")
        for peer in range(size):
            if peer != rank:
                yield Get(peer, rank, source="tmp", to=peer)
        yield Meet(range(size))

    try:
        ranks = Ranks(3)
        calls = ranks.calls("alltoall", ranks.empty(30), ranks.empty(30))
        choice = find("alltoall", "own")
        for executor, call in zip(ranks.executors, calls):
            assert executor.agreed(call, choice) == "by own in symmetric memory tmp @1+0"
            assert executor.unknown(call, choice, False) is None
            assert "whether its out is" in executor.unknown(call, choice, True)
        filled([call.x for call in calls])
        ranks.run(ranks.bound("own", calls))
        for rank, call in enumerate(calls):
            assert (call.out == np.concatenate([c.x[10 * rank :][:10] for c in calls])).all()
    finally:
        unregister("alltoall", "own")


def test_no_shadow_in_the_background():
    """Two operations in the background may read one input, and its shadow is one."""
    ranks = Ranks(2)
    calls = ranks.calls("reduce", ranks.empty(10), ranks.empty(10), op="sum")
    assert ranks.why_not("in_place_fetched", calls) == [None, None]
    assert (
        "others reach its scratch memory 'tmp'" in ranks.why_not("in_place_fetched", calls, True)[0]
    )


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda rank: Meet((rank, (rank + 1) % 3)), "rank 0: the meeting of ranks .0, 1. never"),
        (lambda rank: Meet(()), "rank 0: Meet.* is without this rank"),
        (
            lambda rank: Meet(range(4)),
            "rank 0: Meet.* names rank 3; the node has the",
        ),
        (lambda rank: Get(3), "rank 0: Get.* names rank 3; the node has the ranks 0, 1, 2"),
        (lambda rank: Fold((rank, -1)), "rank 0: Fold.* names rank -1; the node has"),
        (
            lambda rank: Put((rank + 1) % 3, source="in", target="in"),
            "rank 0: Put.* writes 'in' of another rank; in 'mapped' memory others may write 'out',",
        ),
    ],
)
def test_steps_that_cannot_be(step, why):
    algorithm("barrier", "wrong", memory="mapped")(lambda rank, size: iter([step(rank)]))
    try:
        ranks = Ranks(3)
        with pytest.raises(ScheduleError, match=why):
            ranks.bound("wrong", ranks.calls("barrier", [None] * 3, [None] * 3))
    finally:
        unregister("barrier", "wrong")
