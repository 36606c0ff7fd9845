"""Collectives on arrays of ``comm.empty``: the results of messages, without messages."""

import gc
import os
import re
import time
import weakref

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist import CollectiveConfig, Communicator
from mpidist.backends.mpi import MpiBackend
from mpidist.engine.symmetric import Symmetric
from mpidist.shared_memory.barrier import Barrier

pytestmark = pytest.mark.one_node

SIZES = (0, 1, 7, 1009, 70_001)


@pytest.fixture
def own(comm):
    """A communicator that a test may break."""
    made = Communicator(MpiBackend(comm.backend.comm), CollectiveConfig(timeout=90.0))
    yield made


def data(rank, n, dtype="float32"):
    return (((np.arange(n) * 7 + rank * 3) % 11) / 8).astype(dtype)


def everyone(comm, n, dtype="float32"):
    return [data(r, n, dtype) for r in range(comm.size)]


@pytest.mark.parametrize("n", SIZES)
def test_allreduce_has_the_bits_of_direct(comm, n):
    x = comm.empty(n, "float32")
    random = np.random.default_rng(comm.rank)
    for op in ("sum", "mean", "max", "prod"):
        for _ in range(3):
            x[:] = random.random(n, dtype="float32") - 0.5
            by_messages = comm.allreduce(np.array(x), op, algorithm="direct")
            assert comm.allreduce(x, op, out=x, algorithm="symmetric") is x
            assert x.tobytes() == by_messages.tobytes()


@pytest.mark.parametrize("n", SIZES)
def test_allreduce_out_of_place(comm, n):
    x, out = comm.empty(n, "float64"), comm.empty(n, "float64")
    x[:] = data(comm.rank, n)
    for source in (x, np.array(x)):
        out[:] = -1
        comm.allreduce(source, out=out, algorithm="symmetric")
        assert (out == sum(everyone(comm, n, "float64"))).all()
        assert (x == data(comm.rank, n)).all()


@pytest.mark.parametrize("n", SIZES)
def test_rooted(comm, n):
    x, whole = comm.empty(n, "float32"), comm.empty(n * comm.size, "float32")
    parts = everyone(comm, n)
    for root in range(comm.size):
        x[:] = data(comm.rank, n)
        got = comm.reduce(x, "max", root=root, algorithm="symmetric")
        assert got is None if comm.rank != root else (got == np.max(parts, axis=0)).all()
        got = comm.gather(x, root=root, algorithm="symmetric")
        assert got is None if comm.rank != root else (got == np.concatenate(parts)).all()
        comm.broadcast(x, root=root, algorithm="symmetric")
        assert (x == parts[root]).all()
        source = np.concatenate(parts) if comm.rank == root else None
        x[:] = -1
        comm.scatter(source, root=root, out=x, algorithm="symmetric")
        assert (x == parts[comm.rank]).all()
        x[:] = data(comm.rank, n)
        mine = whole[comm.rank * n : (comm.rank + 1) * n]
        mine[:] = x
        out = whole if comm.rank == root else None
        got = comm.gather(x, root=root, out=out, algorithm="symmetric")
        assert got is None if comm.rank != root else got is whole
        if comm.rank == root:
            assert (whole == np.concatenate(parts)).all()


@pytest.mark.parametrize("n", SIZES)
def test_all_to_all(comm, n):
    p, r = comm.size, comm.rank
    x, out = comm.empty(n * p, "int64"), comm.empty(n * p, "int64")
    x[:] = np.arange(n * p) + 1000 * r
    mine = slice(r * n, (r + 1) * n)
    everybody = [np.arange(n * p) + 1000 * k for k in range(p)]
    comm.alltoall(x, out=out, algorithm="symmetric")
    assert (out == np.concatenate([e[mine] for e in everybody])).all()
    got = comm.reduce_scatter(x, algorithm="symmetric")
    assert (got == sum(everybody)[mine]).all()
    comm.allgather(x[:n], out=out, algorithm="symmetric")
    assert (out == np.concatenate([e[:n] for e in everybody])).all()
    out[mine] = r
    comm.allgather(out[mine], out=out, algorithm="symmetric")
    assert (out == np.repeat(np.arange(p), n)).all()


@pytest.mark.parametrize("n", SIZES)
def test_alltoall_in_place(comm, n):
    """Sent and overwritten is the same memory; it is no reason to leave the quick way."""
    p, r = comm.size, comm.rank
    x = comm.empty(n * p, "int64")
    expected = [np.arange(n) + 1000 * k + 100_000 * r for k in range(p)]
    for _ in range(3):
        x[:] = np.concatenate([np.arange(n) + 1000 * r + 100_000 * k for k in range(p)])
        assert comm.alltoall(x, out=x, algorithm="symmetric") is x
        assert (x == np.concatenate(expected)).all()
    x[:] = np.concatenate([np.arange(n) + 1000 * r + 100_000 * k for k in range(p)])
    work = comm.ialltoall(x, out=x, algorithm="symmetric")
    assert work.wait() is x and (x == np.concatenate(expected)).all()


def test_uneven_counts(comm):
    p, r = comm.size, comm.rank
    counts = [3 * k + 1 for k in range(p)]
    out = comm.empty(sum(counts), "float32")
    comm.allgather(np.full(counts[r], r, "float32"), out=out, counts=counts, algorithm="symmetric")
    assert (out == np.repeat(np.arange(p), counts)).all()
    got = comm.reduce_scatter(out, counts=counts, algorithm="symmetric")
    assert (got == p * r).all() and got.shape == (counts[r],)


def test_shapes_views_and_repeats(comm):
    x = comm.empty((30, 40), "float32")
    assert x.shape == (30, 40) and not x.any()
    for k in range(5):
        x[...] = comm.rank + k
        comm.allreduce(x, out=x, algorithm="symmetric")
        assert (x == sum(r + k for r in range(comm.size))).all()
        part = x[10:20]
        part[...] = comm.rank
        comm.broadcast(part, root=comm.size - 1, algorithm="symmetric")
        assert (part == comm.size - 1).all()
        assert (x[:10] == sum(r + k for r in range(comm.size))).all()


def test_auto_takes_it_where_it_is_faster(comm, monkeypatch):
    x, made, plain = comm.empty(1 << 16, "float32"), [], Symmetric.program
    monkeypatch.setattr(Symmetric, "program", lambda *given: made.append(given) or plain(*given))
    comm.allreduce(x, out=x)
    assert [call.collective for _, call, *_ in made] == ["allreduce"]


def test_private_arrays_are_refused_by_name(comm):
    x = np.zeros(10)
    with pytest.raises(mpidist.Unsupported, match="comm.empty"):
        comm.allreduce(x, out=x, algorithm="symmetric")
    with pytest.raises(mpidist.Unsupported, match="comm.empty"):
        comm.iallreduce(comm.empty(10), algorithm="symmetric")


def test_memory_is_freed_with_its_array(comm):
    x = comm.empty(1000)
    heap = comm._service.heap
    known = len(heap._allocations)
    gone = weakref.ref(x)
    comm.allreduce(x, out=x, algorithm="symmetric")
    if comm.rank == 0:
        del x
        gc.collect()
        assert gone() is None and len(heap._allocations) == known - 1
    y = comm.empty(1000)
    y[:] = 1
    comm.allreduce(y, out=y, algorithm="symmetric")
    assert (y == comm.size).all()


def test_free(comm):
    x = comm.empty(1000)
    comm.free(x)
    with pytest.raises(mpidist.Unsupported, match="out was not allocated by comm.empty"):
        comm.allreduce(x, out=x, algorithm="symmetric")
    x[:] = 1
    assert (comm.allreduce(x) == comm.size).all()
    for wrong in (np.zeros(3), [1.0], 3):
        with pytest.raises(mpidist.InvalidArgument, match=f"rank {comm.rank}: free"):
            comm.free(wrong)


@pytest.mark.mpi(min_size=2)
def test_one_rank_brings_private_memory(own):
    own.timeout = 1.0
    shared = own.empty(1 << 16, "float32")
    x = shared if own.rank else np.zeros(1 << 16, "float32")
    with pytest.raises(
        (mpidist.CollectiveTimeout, mpidist.CollectiveMismatch), match="on rank|not arrived"
    ):
        own.allreduce(x, out=x)


def test_bad_arguments(comm):
    for shape, dtype in ((-1, "float32"), ((2, 1.5), "float32"), (3, object)):
        with pytest.raises(mpidist.InvalidArgument, match=f"rank {comm.rank}"):
            comm.empty(shape, dtype)


def test_nothing_is_left_behind(comm):
    x = comm.empty(10)
    comm.barrier()
    with open("/proc/self/maps") as maps:
        # By its file, because the folder of the launcher's session begins with mpidist-, too.
        ours = [line for line in maps if re.search(r"(shm/|memfd:)mpidist-(?!flight)", line)]
    assert ours and all(line.rstrip().endswith("(deleted)") for line in ours)
    assert x.size == 10


def test_parts_of_no_elements(comm):
    """An empty part has no address: the ranks cannot tell where the others' parts are."""
    p, r, last = comm.size, comm.rank, comm.size - 1
    counts = [0] * (p - 1) + [5]
    x = comm.empty(20, "float32")
    for root in range(p):
        x[:] = r
        part = x[7 : 7 + counts[r]]
        got = comm.gather(part, root=root, counts=counts)
        assert got is None if r != root else (got == last).all() and got.shape == (5,)
        source = np.arange(5, dtype="float32") if r == root else None
        comm.scatter(source, root=root, out=part, counts=counts)
        assert (x[7:12] == (np.arange(5) if r == last else r)).all()
        assert (x[:7] == r).all() and (x[12:] == r).all()


def flags_do_not_overtake(comm, n, rounds):
    """Each rank writes its part, meets the others, and reads theirs: never what was before."""
    x = comm.empty(n * comm.size, "int64")
    heap = comm._service.heap
    place = heap.find(x)
    views = place.views(x.size, x.dtype)
    barrier = Barrier(heap.lines, [0])
    stale = 0
    for k in range(1, rounds + 1):
        for peer in range(comm.size):  # push into everybody's
            views[peer][comm.rank * n : (comm.rank + 1) * n] = k * 10 + comm.rank
        barrier.start()
        assert comm._service.sequencer.engine.wait(barrier.test, time.monotonic() + 90)
        for peer in range(comm.size):
            part = x[peer * n : (peer + 1) * n]
            stale += int(part[0] != k * 10 + peer) + int(part[-1] != k * 10 + peer)
        barrier.start()
        assert comm._service.sequencer.engine.wait(barrier.test, time.monotonic() + 90)
    return stale


@pytest.mark.parametrize(("n", "rounds"), [(1, 3000), (40, 2000), (4099, 500), (200_003, 20)])
def test_a_flag_never_overtakes_data(comm, n, rounds):
    """From one word to more than the caches hold, where copies may go past them."""
    assert flags_do_not_overtake(comm, n, rounds) == 0


@pytest.mark.mpi(min_size=2)
def test_the_ranks_want_different_arrays(comm):
    """All hear of it, with who wanted what, and all goes on."""
    odd = comm.rank == comm.size - 1
    for shape, dtype, error in (
        ((3, 4 + odd), "float32", mpidist.CollectiveMismatch),
        ((3, 4), "float64" if odd else "float32", mpidist.CollectiveMismatch),
        ((-1 if odd else 3, 4), "float32", mpidist.CollectiveMismatch),
        ((3, 4), "no such dtype", mpidist.InvalidArgument),
        ((1 << 50,), "float64", MemoryError),
    ):
        with pytest.raises(error, match=f"rank {comm.rank}\\b"):
            comm.empty(shape, dtype)
        assert comm.allreduce(1) == comm.size
    assert comm.empty((3, 4), "float32").shape == (3, 4)


def ours():
    with open("/proc/self/maps") as maps:
        return sum("mpidist-symmetric" in line for line in maps)


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_memory_is_given_back(comm):
    """Taken and dropped again and again, on some ranks later than on others."""
    comm.empty(1)
    gc.collect()
    mappings, bytes_before, kept = ours(), 0, []
    files, many = os.listdir("/proc/self/fd"), [comm.empty(3) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= len(files) and ours() == mappings + len(many)
    del many
    for k in range(60):
        x = comm.empty(1 << 18, "float32")
        x[:] = comm.rank
        comm.allreduce(x, out=x, algorithm="symmetric")
        if comm.rank == k % comm.size:
            kept.append(x)  # the others drop theirs first
        if len(kept) > 2:
            assert all((old == sum(range(comm.size))).all() for old in kept)
            kept.clear()
        if k == 20:
            bytes_before = resident()
    del x
    kept.clear()
    gc.collect()
    assert ours() == mappings
    assert resident() < bytes_before + (8 << 20)


@pytest.mark.parametrize("n", (1, 1009, 70_001))
def test_in_place_gather_and_scatter(comm, n):
    p, r = comm.size, comm.rank
    whole = comm.empty(n * p, "float32")
    part = whole[r * n : (r + 1) * n]
    for root in range(p):
        whole[:] = -1
        part[:] = data(r, n)
        comm.gather(part, root=root, out=whole if r == root else None, algorithm="symmetric")
        if r == root:
            assert (whole == np.concatenate(everyone(comm, n))).all()
            whole[:] = np.concatenate(everyone(comm, n)) + 1
        else:
            part[:] = -1
        given = whole if r == root else None
        comm.scatter(given, root=root, out=part, algorithm="symmetric")
        assert (part == data(r, n) + 1).all()


@pytest.mark.parametrize("n", SIZES)
def test_roots_array_out_of_reach(comm, n):
    """The others have dropped their arrays of the root's allocation, or the root's is private."""
    x, whole, other = comm.empty(n), comm.empty(n * comm.size), comm.empty(n)
    x[:] = data(comm.rank, n)
    if comm.rank:
        del whole, other
    gc.collect()
    comm.barrier()
    outs = [(whole, other)] if comm.rank == 0 else [(None, None)]
    outs.append((np.empty(n * comm.size), np.empty(n)) if comm.rank == 0 else (None, None))
    for long, short in outs:
        got = comm.gather(x, out=long, algorithm="symmetric")
        total = comm.reduce(x, out=short, algorithm="symmetric")
        if comm.rank == 0:
            assert (got == np.concatenate(everyone(comm, n, "float64"))).all()
            assert (total == sum(everyone(comm, n, "float64"))).all()
        back = comm.scatter(long, out=x, algorithm="symmetric")
        assert (back == data(comm.rank, n)).all()


def test_roots_arrays_of_operations_in_the_background(comm):
    """Each operation under way has notes of its own on where its root's array lies."""
    n, p = 1009, comm.size
    wholes = [(np, comm)[k % 2].empty(n * p) for k in range(8)]
    parts = [comm.empty(n) for _ in wholes]
    for turn in range(5):
        root = turn % p
        works = []
        for k, (whole, part) in enumerate(zip(wholes, parts)):
            part[:] = turn + k + comm.rank
            given = whole if comm.rank == root else None
            works.append(comm.igather(part, root=root, out=given, algorithm="symmetric"))
        for work in works:
            work.wait()
        if comm.rank == root:
            for k, whole in enumerate(wholes):
                ranks = whole.reshape(p, n)
                assert (ranks == turn + k + np.arange(p)[:, None]).all()
                ranks += 1
        works = [
            comm.iscatter(
                whole if comm.rank == root else None, root=root, out=part, algorithm="symmetric"
            )
            for whole, part in zip(wholes, parts)
        ]
        for k, (work, part) in enumerate(zip(works, parts)):
            work.wait()
            assert (part == turn + k + comm.rank + 1).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n", (0, 1, 1009, 5003, 200_003))
def test_half_precision_is_summed_in_float32(comm, dtype, n):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = comm.empty(n, dtype)
    random = [np.random.default_rng(r).standard_normal(n).astype(dtype) for r in range(comm.size)]
    for op, way in (("sum", "symmetric"), ("mean", "symmetric"), ("sum", "staged")):
        x[:] = random[comm.rank]
        comm.allreduce(x, op, out=x, algorithm=way)
        exact = np.sum([r.astype("float64") for r in random], axis=0)
        exact = exact / (comm.size if op == "mean" else 1)
        once = np.abs(exact - exact.astype(dtype).astype("float64"))
        error = np.abs(x.astype("float64") - exact)
        assert (error <= once + 1e-5 * (1 + np.abs(exact))).all()
    bits = comm.allgather(np.array(x).view("uint16"), algorithm="ring").reshape(comm.size, -1)
    assert (bits == bits[0]).all()
    for special in (np.nan, np.inf):
        x[:] = special
        comm.allreduce(x, out=x, algorithm="symmetric")
        assert np.isnan(x).all() if np.isnan(special) else (x == special).all()


def test_in_the_background(comm):
    """Several at a time on one communicator, and blocking calls between."""
    arrays = [comm.empty(5003, "int64") for _ in range(6)]
    for turn in range(20):
        works = []
        for k, x in enumerate(arrays):
            x[:] = turn * k + comm.rank
            works.append(comm.iallreduce(x, out=x, algorithm="symmetric"))
        y = np.array([comm.rank])
        assert comm.allreduce(y)[0] == sum(range(comm.size))
        done = comm.ibarrier(algorithm="symmetric")
        for k in (3, 1, 5, 0, 2, 4):
            works[k].wait()
            assert (arrays[k] == turn * k * comm.size + sum(range(comm.size))).all()
        done.wait()


def test_a_barrier_without_messages(comm):
    x = comm.empty(comm.size, "int64")
    for k in range(300):
        x[comm.rank] = k
        comm.barrier(algorithm="symmetric")
        place = comm._service.heap.find(x)
        seen = [int(view[r]) for r, view in enumerate(place.views(x.size, x.dtype))]
        assert seen == [k] * comm.size
        comm.barrier(algorithm="symmetric")
