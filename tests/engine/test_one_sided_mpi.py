"""Schedules with messages between nodes and shared memory in them: every collective and memory."""

import gc
import json
import time
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist import CollectiveConfig, Unsupported
from mpidist.schedule import Get, Meet
from mpidist.schedule import algorithm as registered
from mpidist.schedule.registry import find, unregister
from mpidist.schedule.rounds import blocks
from tests.support.pretended import on_nodes

MEMORIES = ("in_place", "slots", "published")
FAMILIES = ("hierarchical", "hierarchical_leaders")
ROOTED = ("broadcast", "reduce")
WITH_DATA = ("allreduce", "reduce_scatter", "allgather", *ROOTED)
ACROSS = {
    "allreduce": "ring",
    "reduce_scatter": "ring",
    "allgather": "ring",
    "barrier": "dissemination",
}


def algorithm(nodes, family, memory, collective):
    """The name of an algorithm that these nodes can run: lanes need nodes of one length."""
    if len({len(node) for node in nodes.topology.groups}) > 1:
        family = "hierarchical_leaders"
    return f"{family}/{memory}/{ACROSS.get(collective, 'binomial')}"


def value(rank, n, turn=0):
    return (np.arange(n) % 13 + 2.0 * rank + turn).astype("float32")


def arrays(nodes, memory, *lengths):
    make = nodes.empty if memory == "in_place" else np.empty
    return [make(n, "float32") for n in lengths]


class Case:
    """One collective with its arrays, and the result that each rank must get."""

    def __init__(self, nodes, memory, collective, n, root=0):
        self.comm, self.collective, self.n, self.root = nodes, collective, n, root
        size = nodes.size
        long = n * size if collective in ("allgather", "reduce_scatter") else n
        self.short, self.long = arrays(nodes, memory, n, long)
        self.given = self.long if collective == "reduce_scatter" else self.short
        self.out = {"allgather": self.long, "reduce_scatter": self.short}.get(collective)
        if collective in ("allreduce", "reduce"):
            (self.out,) = arrays(nodes, memory, n)

    def call(self, name, **how):
        function = getattr(
            self.comm, ("i" if how.pop("background", False) else "") + self.collective
        )
        how |= {"root": self.root} if self.collective in ROOTED else {}
        if self.collective == "broadcast":
            return function(self.given, algorithm=name, **how)
        out = self.out if self.collective != "reduce" or self.comm.rank == self.root else None
        return function(self.given, out=out, algorithm=name, **how)

    def check(self, turn, op=sum):
        rank, size = self.comm.rank, self.comm.size
        values = [value(r, self.given.size, turn) for r in range(size)]
        if self.collective == "broadcast":
            assert (self.given == values[self.root]).all()
        elif self.collective == "allgather":
            assert (self.out == np.concatenate(values)).all()
        elif self.collective == "reduce_scatter":
            assert (self.out == op(values)[rank * self.n : (rank + 1) * self.n]).all()
        elif self.collective == "allreduce" or rank == self.root:
            assert (self.out == op(values)).all()

    def fill(self, turn):
        self.given[:] = value(self.comm.rank, self.given.size, turn)


@pytest.mark.parametrize("n", (0, 5, 20_011))
@pytest.mark.parametrize("collective", WITH_DATA)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_collectives(nodes, family, memory, collective, n):
    """The first call, repeated ones, and other values in each."""
    name = algorithm(nodes, family, memory, collective)
    for root in range(nodes.size) if collective in ROOTED else (0,):
        case = Case(nodes, memory, collective, n, root)
        for turn in range(4):
            case.fill(turn)
            case.call(name)
            case.check(turn)


@pytest.mark.parametrize(
    ("memory", "collective"), [(m, c) for m in ("in_place", "published") for c in WITH_DATA[:4]]
)
def test_long_messages_go_in_segments(nodes, memory, collective):
    """Between the nodes, in strands; unequal blocks are cut alike on both sides."""
    name = algorithm(nodes, "hierarchical", memory, collective)
    case = Case(nodes, memory, collective, 400_009)
    for turn in range(3):
        case.fill(turn)
        case.call(name)
        case.check(turn)


@pytest.mark.parametrize("collective", WITH_DATA)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_background(nodes, family, collective):
    """Some at once, waited for in another order; scratch memory beside "in" is refused alike."""
    name = algorithm(nodes, family, "in_place", collective)
    cases = [Case(nodes, "in_place", collective, 1000 + k) for k in range(3)]
    for turn in range(3):
        for case in cases:
            case.fill(turn)
        try:
            works = [case.call(name, background=True) for case in cases]
        except Unsupported as error:
            assert "beside an array of comm.empty" in str(error)
            return
        for work, case in zip(works[::-1], cases[::-1]):
            work.wait()
            case.check(turn)
    for memory in ("slots", "published"):
        with pytest.raises(Unsupported, match="cannot run in the background"):
            case.call(name.replace("in_place", memory), background=True)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_operations(nodes, family, memory):
    name = algorithm(nodes, family, memory, "allreduce")
    size, n = nodes.size, 1000
    for dtype, op, want in (
        ("int16", "max", 3 * size - 3),
        ("float64", "mean", 1.5 * (size - 1)),
        ("float16", "mean", 1.5 * (size - 1)),
        ("complex64", "prod", 0),
        ("float32", mpidist.Op(np.maximum, commute=True), 3 * size - 3),
    ):
        x, out = (
            nodes.empty(n, dtype) if memory == "in_place" else np.empty(n, dtype) for _ in range(2)
        )
        x[:] = 3 * nodes.rank
        nodes.allreduce(x, op, out=out, algorithm=name)
        assert np.allclose(out, want) and (x == 3 * nodes.rank).all()
        nodes.allreduce(x, op, out=x, algorithm=name)
        assert np.allclose(x, want)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_mean_of_half_precision_does_not_overflow(nodes, memory):
    name = algorithm(nodes, "hierarchical", memory, "allreduce")
    x = nodes.empty(64, "float16") if memory == "in_place" else np.empty(64, "float16")
    x[:] = 60_000
    nodes.allreduce(x, "mean", out=x, algorithm=name)
    assert np.allclose(x, 60_000, rtol=1e-2)
    if memory != "in_place":
        x = np.full(64 * nodes.size, 60_000, "float16")
        for collective in ("reduce_scatter", "reduce"):
            how = {"algorithm": algorithm(nodes, "hierarchical", memory, collective)}
            found = getattr(nodes, collective)(x, "mean", **how)
            assert found is None or np.allclose(found, 60_000, rtol=1e-2)
            assert (x == 60_000).all()


def test_a_private_input_is_copied_to_a_symmetric_result(nodes):
    name = algorithm(nodes, "hierarchical", "in_place", "allreduce")
    x, out = value(nodes.rank, 500), nodes.empty(500, "float32")
    for _ in range(3):
        nodes.allreduce(x, out=out, algorithm=name)
        assert (out == sum(value(r, 500) for r in range(nodes.size))).all()
    assert (x == value(nodes.rank, 500)).all()


def test_refusals_are_alike_and_leave_it_usable(nodes):
    name = algorithm(nodes, "hierarchical", "in_place", "allreduce")
    by_slots = name.replace("in_place", "slots")
    if max(len(node) for node in nodes.topology.groups) > 1:  # else nothing is reached
        with pytest.raises(Unsupported, match="(x|out) was not allocated by comm.empty"):
            nodes.allreduce(np.ones(10), algorithm=name)
        with pytest.raises(Unsupported, match="bytes of a staging slot, which has 2 MiB"):
            nodes.allreduce(np.ones(1 << 20), algorithm=by_slots)
    else:
        assert (nodes.allreduce(np.ones(1 << 20), algorithm=by_slots) == nodes.size).all()
    with pytest.raises(Unsupported, match="memory is shared within each node only"):
        nodes.allreduce(np.ones(10), algorithm="staged")
    assert nodes.allreduce(1) == nodes.size


@pytest.mark.parametrize("memory", MEMORIES)
def test_same_bits_each_time(nodes, memory):
    """On all ranks, in the first call and in repeated ones."""
    name = algorithm(nodes, "hierarchical", memory, "allreduce")
    x, out = arrays(nodes, memory, 3001, 3001)
    x[:] = np.random.default_rng(nodes.rank).random(3001) - 0.5
    seen = set()
    for _ in range(4):
        nodes.allreduce(x, out=out, algorithm=name)
        seen.add(out.tobytes())
    assert len(seen) == 1 and len(set(nodes.allgather_object(seen.pop()))) == 1


@pytest.mark.parametrize("memory", MEMORIES)
def test_calls_of_other_kinds_between(nodes, memory):
    """Slots, barrier lines and tags are used by turns with messages, native and in-place calls."""
    name = algorithm(nodes, "hierarchical", memory, "allreduce")
    x, out = arrays(nodes, memory, 2000, 2000)
    for turn in range(12):
        x[:] = value(nodes.rank, 2000, turn)
        if turn % 3 == 0:
            assert nodes.allreduce(turn, algorithm="ring") == turn * nodes.size
        if turn % 4 == 1:
            nodes.barrier(algorithm=algorithm(nodes, "hierarchical", memory, "barrier"))
        if turn % 4 == 2 and nodes.rank == 0:
            time.sleep(0.01)
        nodes.allreduce(x, out=out, algorithm=name)
        assert (out == sum(value(r, 2000, turn) for r in range(nodes.size))).all()


def test_arrays_are_not_kept_alive(nodes):
    import weakref

    for memory in MEMORIES:
        name = algorithm(nodes, "hierarchical", memory, "allreduce")
        (x,) = arrays(nodes, memory, 5000)
        for _ in range(3):
            nodes.allreduce(x, out=x, algorithm=name)
        alive = weakref.ref(x)
        del x
        gc.collect()
        assert alive() is None


def test_a_mismatch_is_reported_with_both_calls(comm):
    if comm.size < 4 or comm.topology.num_nodes > 1:
        pytest.skip("needs at least 4 ranks")
    own = on_nodes(comm, 2, CollectiveConfig(timeout=10.0))
    x = own.empty(100)
    other = own.rank == own.size - 1
    with pytest.raises((mpidist.CollectiveMismatch, mpidist.CommunicatorBroken)) as caught:
        name = algorithm(own, "hierarchical", "in_place", "allreduce")
        own.allreduce(x, "max" if other else "sum", out=x, algorithm=name)
        own.barrier()
    assert "allreduce" in str(caught.value)


@pytest.mark.parametrize("per_node", (2, 64))
def test_a_library_call_beside_one_that_sets_up_memory(comm, per_node):
    """The set-up of slots is no call of the library, whatever the calls have in common."""
    if comm.size < 2 or comm.topology.num_nodes > 1:
        pytest.skip("needs at least 2 ranks")
    own = on_nodes(comm, per_node, CollectiveConfig(timeout=10.0))
    one = own.topology.num_nodes == 1
    name = "staged" if one else algorithm(own, "hierarchical", "slots", "allreduce")
    with pytest.raises(mpidist.CollectiveMismatch, match="by staged") as caught:
        own.allreduce(np.ones(100), algorithm="native" if own.rank == 0 else name)
    assert "allreduce op=sum 100 x float64" in str(caught.value)
    assert own.allreduce(1) == own.size


def test_the_algorithm_that_is_named_runs(nodes, tmp_path):
    """Calls of one kind, on new private arrays, share a program: one for each algorithm."""
    names = sorted({algorithm(nodes, family, "slots", "allreduce") for family in FAMILIES})
    names += ["hierarchical_leaders/slots/direct"]
    path = nodes.broadcast_object(str(tmp_path / "trace.json"))
    with nodes.trace(path):
        for name in names:
            for _ in range(3):
                assert (nodes.allreduce(np.ones(100), algorithm=name) == nodes.size).all()
    if nodes.rank == 0:
        found = json.loads(Path(path).read_text())["traceEvents"]
        ran = [e["args"]["algorithm"] for e in found if e.get("cat") == "collective"]
        assert sorted(ran) == sorted(3 * nodes.size * names)
    nodes.barrier()


@pytest.mark.parametrize("memory", ("mapped", None))
def test_a_level_that_is_registered_again(nodes, memory):
    """Its new schedule runs: the whole algorithm has the same name and function as before."""
    ran = []

    def register(turn):
        def broadcast(rank, size, root):
            ran.append(turn)
            if memory is None:
                yield from find("broadcast", "binomial").algorithm.schedule(rank, size, root, 2, ())
                return
            yield Meet(range(size))
            if rank != root:
                yield Get(root)
            yield Meet(range(size))

        registered("broadcast", "twice", memory=memory)(broadcast)

    x = nodes.empty(100)
    try:
        for turn in range(2):
            register(turn)
            x[:] = nodes.rank + turn
            nodes.broadcast(x, algorithm="hierarchical_leaders/twice/binomial")
            assert (x == turn).all()
            if max(len(node) for node in nodes.topology.groups) > 1:
                assert any(nodes.allgather_object(turn in ran))
    finally:
        unregister("broadcast", "twice")


def test_blocks_of_one_length_and_of_another(nodes):
    """Slices of the lanes differ by one element."""
    name = algorithm(nodes, "hierarchical", "slots", "allreduce")
    for n in range(1, 40):
        x = value(nodes.rank, n)
        assert (
            nodes.allreduce(x, algorithm=name) == sum(value(r, n) for r in range(nodes.size))
        ).all()
    assert sum(part.stop - part.start for part in blocks(39, nodes.size)) == 39
