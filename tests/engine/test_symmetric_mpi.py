"""Schedules in symmetric memory, by the name that a call gives: shipped ones, and a user's own."""

import gc
import time

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist import CollectiveConfig, Communicator, Unsupported
from mpidist.backends.mpi import MpiBackend
from mpidist.schedule import Copy, Fold, Get, Meet, Recv, Send, algorithm, algorithms, prove
from mpidist.schedule.registry import unregister

pytestmark = pytest.mark.one_node

SHIPPED = [
    (a.collective, a.name)
    for a in algorithms(one_sided=True)
    if a.memory is not None and a.memory.name == "mapped" and a.name.startswith("in_place")
]
WITH_DATA = [pair for pair in SHIPPED if pair[0] != "barrier"]
ROOTED = ("reduce", "broadcast", "gather", "scatter")
PARTS_IN, PARTS_OUT = ("allgather", "gather"), ("reduce_scatter", "scatter")


def arrays(comm, collective, n, dtype):
    """The arrays of every rank in symmetric memory, `x` and `out`."""
    long = n * comm.size
    if collective == "alltoall":
        return comm.empty(long, dtype), comm.empty(long, dtype)
    x = comm.empty(long if collective in PARTS_OUT else n, dtype)
    return x, comm.empty(long if collective in PARTS_IN else n, dtype)


def called(comm, collective, name, x, out, root, op=None, begin=""):
    """The arguments that every rank has, in the call of one collective."""
    if collective in ("reduce", "gather") and comm.rank != root:
        out = None
    if collective == "scatter" and comm.rank != root:
        x = None
    given = {"algorithm": name} if op is None else {"algorithm": name, "op": op}
    if collective in ROOTED:
        given["root"] = root
    return getattr(comm, begin + collective)(x, out=out, **given)


def by_messages(comm, collective, x, root, op):
    """The bits of ``direct``, whose order the shipped schedules have."""
    if collective == "reduce_scatter":
        return comm.reduce_scatter(x.copy(), op, algorithm="direct")
    total = comm.allreduce(x.copy(), op, algorithm="direct")  # there is no such reduce
    return total if collective == "allreduce" or comm.rank == root else None


def filled(comm, x, turn=0):
    values = np.random.default_rng(10 * comm.rank + turn).random(x.size, "float32") - 0.5
    x[...] = (values * 20).astype(x.dtype)


@pytest.mark.parametrize(("collective", "name"), WITH_DATA)
@pytest.mark.parametrize("n", (0, 7, 70_001))
def test_shipped_schedules_have_the_bits_of_direct(comm, collective, name, n):
    """Blocking, repeated and in the background."""
    beside = (collective, name) == ("reduce", "in_place_fetched")  # not in the background
    ops = ("sum", "mean", "prod", "max") if "reduce" in collective else (None,)
    for dtype in ("float32", "int64") if "reduce" in collective else ("float64",):
        x, out = arrays(comm, collective, n, dtype)
        for op in ops:
            if op == "mean" and dtype == "int64":
                continue
            for root in range(comm.size) if collective in ROOTED else (0,):
                for turn in range(3):
                    filled(comm, x, turn)
                    if "reduce" in collective:
                        right = by_messages(comm, collective, x, root, op)
                    elif collective == "broadcast":
                        right = comm.broadcast(x.copy(), root)
                    else:
                        right = called(comm, collective, "auto", x.copy(), None, root, op)
                    for begin in ("",) if beside else ("", "i"):
                        out[...] = 77
                        got = called(comm, collective, name, x, out, root, op, begin)
                        got = got.wait() if begin else got
                        assert (got is None) == (right is None)
                        assert got is None or got is out and got.tobytes() == right.tobytes()


@pytest.mark.parametrize("dtype", ("float16", ml_dtypes.bfloat16, "complex64", "bool"))
def test_other_dtypes(comm, dtype):
    x, out = comm.empty(1009, dtype), comm.empty(1009, dtype)
    for op in ("sum", "prod") if dtype != "bool" else ("max", "min"):
        filled(comm, x)
        comm.allreduce(x, op, out=out, algorithm="in_place")
        assert out.tobytes() == comm.allreduce(x, op, out=x, algorithm="symmetric").tobytes()


def test_private_input_and_results(comm):
    """In-place algorithms read and store in one array of the call only, which must be symmetric.

    That is the result of an allreduce and the root's of a gather, and the input of a
    reduce_scatter; the other array is a rank's own, and may be any memory.
    """
    n, p, root = 100, comm.size, comm.size - 1
    out = comm.empty(n)
    comm.allreduce(np.full(n, comm.rank + 1.0), out=out, algorithm="in_place")
    assert (out == p * (p + 1) / 2).all()
    whole = comm.empty(n * p)
    part = np.full(n, float(comm.rank))
    got = comm.gather(part, root, whole if comm.rank == root else None, algorithm="in_place")
    if comm.rank == root:
        assert (got == np.repeat(np.arange(p), n)).all()
    x = comm.empty(n * p)
    x[...] = np.repeat(np.arange(p), n)
    assert (comm.reduce_scatter(x, algorithm="in_place") == p * comm.rank).all()


def test_uneven_counts(comm):
    p, rank = comm.size, comm.rank
    counts = [3 * r % 4 for r in range(p)]
    expected = np.repeat(np.arange(p), counts)
    out = comm.empty(sum(counts), "int32")
    comm.allgather(np.full(counts[rank], rank, "int32"), out, counts=counts, algorithm="in_place")
    assert (out == expected).all()
    x = comm.empty(sum(counts), "int32")
    x[...] = np.arange(sum(counts)) + rank
    stop = np.cumsum(counts)[rank]
    got = comm.reduce_scatter(x, counts=counts, algorithm="in_place")
    total = p * np.arange(sum(counts)) + p * (p - 1) // 2
    assert (got == total[stop - counts[rank] : stop]).all()


def test_arrays_in_another_place_are_found_again(comm):
    """The root's array moves from call to call, and a repeated call notices it."""
    n, p = 50, comm.size
    whole = comm.empty((4, n * p))
    x = np.full(n, comm.rank + 1.0)
    for turn in (0, 1, 1, 1, 2, 3, 0, 0, 0):
        whole[...] = 0
        comm.barrier()
        out = whole[turn] if comm.rank == 0 else None
        comm.gather(x, 0, out, algorithm="in_place")
        if comm.rank == 0:
            assert (whole[turn] == np.repeat(np.arange(p) + 1, n)).all()
            assert not np.delete(whole, turn, axis=0).any()


@pytest.mark.parametrize("n", (100, 100_000))
def test_reductions_of_one_input_in_the_background(comm, n):
    """Nobody reaches the root's results: the two operations share no memory all the same."""
    x, p = comm.empty(n), comm.size
    x[:] = comm.rank + 1
    for _ in range(3):
        total, most = np.zeros(n), np.zeros(n)
        works = [
            comm.ireduce(x, op, out=out if comm.rank == 0 else None, algorithm="symmetric")
            for op, out in (("sum", total), ("max", most))
        ]
        if comm.rank == 0:
            time.sleep(0.02)
        for k in range(100):
            works[k % 2].test()
        for work in works:
            work.wait()
        if comm.rank == 0:
            assert (total == p * (p + 1) / 2).all() and (most == p).all()


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


@pytest.fixture
def pairs():
    algorithm("allreduce", "by_pairs", blocks=2, memory="mapped")(by_pairs)
    yield "by_pairs"
    unregister("allreduce", "by_pairs")


def test_own_schedule(comm, pairs):
    """Blocking, in the background, repeated, in place; see test_symmetric.py for others."""
    prove("allreduce", pairs, comm.size)
    for n in (0, 1, 5, 1009):
        x, out = comm.empty(n), comm.empty(n)
        for turn in range(4):
            x[:] = np.arange(n) * (comm.rank + 1) + turn
            right = np.arange(n) * (comm.size * (comm.size + 1) // 2) + turn * comm.size
            assert comm.allreduce(x, out=out, algorithm=pairs) is out
            assert (out == right).all()
            assert comm.iallreduce(x, out=out, algorithm=pairs).wait() is out
            assert (out == right).all()
            mean = comm.allreduce(x, "mean", out=out, algorithm=pairs)
            np.testing.assert_allclose(mean, right / comm.size)
            assert (comm.allreduce(x, out=x, algorithm=pairs) == right).all()


# -- what cannot be -------------------------------------------------------------------------------


def test_private_arrays_are_refused_by_name(comm):
    x, out = np.ones(9), comm.empty(9)
    if comm.size == 1:  # nothing is reached
        assert (comm.allreduce(x, algorithm="in_place") == x).all()
        return
    for call in (
        lambda: comm.allreduce(x, out=np.ones(9), algorithm="in_place"),
        lambda: comm.broadcast(x, algorithm="in_place"),
        lambda: comm.iallreduce(x, out=np.ones(9), algorithm="in_place"),
    ):
        with pytest.raises(Unsupported, match="'in_place': (x|out) was not allocated by "):
            call()
    with pytest.raises(Unsupported, match="'in_place': x was not allocated by comm.empty()"):
        comm.reduce(x, out=out if comm.rank == 0 else None, algorithm="in_place")
    comm.allreduce(out, out=out, algorithm="in_place")


def test_a_mean_of_half_precision_in_steps_does_not_overflow(comm, pairs):
    x, out = comm.empty(10, "float16"), comm.empty(10, "float16")
    x[:] = 60_000
    for given in (x, x.copy()):
        comm.allreduce(given, "mean", out=out, algorithm=pairs)
        assert np.allclose(out, 60_000, rtol=1e-2) and (given == 60_000).all()
    comm.allreduce(x, "mean", out=x, algorithm=pairs)
    assert np.allclose(x, 60_000, rtol=1e-2)


def test_messages_between_meetings(comm):
    """A schedule of its own with both: rank 0 combines all arrays, and sends the result."""

    @algorithm("allreduce", "told", memory="mapped", ordered=True)
    def told(rank, size):
        yield Meet(range(size))
        if rank == 0:
            yield Fold(range(size), target="tmp")
            sends = (Send(peer, buffer="tmp") for peer in range(1, size))
            yield (*sends, Copy(0, 0, "tmp"))
        else:
            yield Recv(0)
        yield Meet(range(size))

    try:
        x = comm.empty(1000)
        for turn in range(6):
            x[...] = comm.rank + turn
            total = comm.size * turn + sum(range(comm.size))
            if turn < 4:
                comm.allreduce(x, out=x, algorithm="told")
            else:
                comm.iallreduce(x, out=x, algorithm="told").wait()
            assert (x == total).all()
    finally:
        unregister("allreduce", "told")


@pytest.mark.mpi(min_size=2)
def test_locations_are_compared(comm):
    """On a communicator that may break: each rank names an array at another place."""
    own = Communicator(MpiBackend(comm.backend.comm), CollectiveConfig(timeout=60.0))
    x = own.empty((2, 8))
    row = x[comm.rank % 2]
    with pytest.raises(mpidist.CollectiveMismatch, match="by in_place in symmetric memory in @"):
        own.allreduce(row, out=row, algorithm="in_place")


def test_arrays_are_not_kept_alive(comm):
    x = comm.empty(1000)
    for _ in range(3):
        comm.allreduce(x, out=x, algorithm="in_place")
        comm.gather(x, 0, None, algorithm="in_place_fetched")
    before = len(comm._service.heap._allocations)
    del x
    gc.collect()
    assert len(comm._service.heap._allocations) == before - 1
