"""Arrays on a GPU, by every executor that an emulated device can take: its streams are lazy.

Nothing here has run on a GPU; that is what test_executors_cuda.py is for.
"""

import gc
import os
import weakref

import ml_dtypes
import numpy as np
import pytest

from mpidist import Communicator
from mpidist.backends import memory_file
from mpidist.calls.arrays import owner
from mpidist.calls.call import Call
from mpidist.device.find import find_device
from mpidist.device.recognise import as_device_array
from mpidist.errors import (
    CollectiveMismatch,
    ConfigError,
    InvalidArgument,
    Unsupported,
    UnsupportedDtype,
)
from mpidist.gpu.executors import CLASSES, NAMES
from mpidist.gpu.staged import HostStaged
from mpidist.operations import OPS, find_op, kind_of
from tests.support import collectives as cases
from tests.support.gpu_kits import OnDevice

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128", ">f4"]
DTYPES = [*map(np.dtype, DTYPES), np.dtype(ml_dtypes.bfloat16)]
EXECUTORS = ("staged", "mpi")


@pytest.fixture
def make(comm, emulated_device, monkeypatch):
    """Makes a communicator with settings of its own for GPUs."""
    made = []

    def make(executor="", chunk=64, **environ):
        monkeypatch.setenv("MPIDIST_GPU", executor)
        monkeypatch.setenv("MPIDIST_GPU_CHUNK_BYTES", str(chunk))
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        made.append(Communicator(comm.backend.split(0, comm.rank), comm.config))
        return made[-1]

    yield make
    for one in made:
        one.free()


def taken(comm, collective):
    return next(
        c.name for c in comm.gpu.candidates if c.taken and collective in CLASSES[c.operations]
    )


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_every_collective(make, collective, executor):
    """Lengths that fill no chunk, one, and many; in place and not; every root."""
    sub = make(executor)
    for number, n in enumerate([*cases.lengths(sub.size), 8]):
        for in_place in (False, True):
            root = (number + in_place) % sub.size
            for background in (False, True):
                there = OnDevice(sub, background)
                cases.CHECKS[collective](there, "auto", n, "int64", root, in_place)
    own = cases.names(collective)[1]  # an algorithm of ours
    for name, n, in_place in (("native", 33, False), (own, 1, True), (own, 33, False)):
        cases.CHECKS[collective](OnDevice(sub), name, n, "float64", 0, in_place)
    movement = collective in CLASSES["movement"]
    assert taken(sub, collective) == (executor if movement else "staged")


# -- the memory of the chunks


@pytest.fixture
def places(monkeypatch):
    """Gives the list of where the host arrays of a communicator's calls are from here on."""

    def places(sub):
        service, found = sub._service, []
        serve, heap = service.serve, service.heap

        def spied(prepared, *arguments, **options):
            call = prepared.call
            if not call.on_device:
                data = {"x": call.x, "out": call.out}
                at = {k: heap.find(v) for k, v in data.items() if v is not None}
                found.append({k: None if v is None else v.key for k, v in at.items()})
            return serve(prepared, *arguments, **options)

        monkeypatch.setattr(service, "serve", spied)
        return found

    return places


@pytest.fixture
def locked(emulated_device):
    """Gives the number of page-locked arrays beside those that other tests left behind."""
    before = set(find_device().locked)
    return lambda: len(set(find_device().locked) - before)


def by_argument(places):
    """Give the set of places of each argument."""
    return {k: {each[k] for each in places if k in each} for k in ("x", "out")}


@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_chunks_are_symmetric(make, places, locked, collective):
    """Each is at one place on all ranks, and served there, where that is the rule."""
    chunk = 1 << 20
    sub = make("staged", chunk=chunk)
    found, served = places(sub), []
    sub._service.note = lambda each: served.append((each.executor, each.nbytes > chunk))
    for root, in_place in ((sub.size - 1, False), (0, True)):
        cases.CHECKS[collective](OnDevice(sub), "auto", 800_001, "int64", root, in_place)
    sub._service.note = None
    every = sub.allgather_object(found)
    assert len({len(each) for each in every}) == 1 and len(found) >= 2 * 6
    for ours in zip(*every):  # the same call on all ranks
        for argument, where in by_argument(ours).items():
            assert None not in where and len(where) <= 1, (argument, where)
    if collective not in ("gather", "scatter"):  # of which only long ones are
        by_rule = set(served) - {("staged", False)}  # slots, tried or for a short rest
        assert by_rule == {("staged", True), ("symmetric", False)}
    assert locked() == 1


@pytest.mark.parametrize("full", ["memory", "locks"])
def test_chunks_are_private_if_one_rank_cannot(make, places, locked, monkeypatch, full):
    """Symmetric memory was refused on one rank: the buffers of all are private from then on."""
    sub, device = make("staged", chunk=2 << 20), find_device()
    create, asked = memory_file.create, []

    def refuse(nbytes, purpose, kind=memory_file.KINDS[0]):
        if nbytes > (16 << 20) * sub.size:
            asked.append(nbytes)
            raise MemoryError("this node is full")
        return create(nbytes, purpose, kind)

    def refuse_lock(memory):
        asked.append(memory.nbytes)
        raise Unsupported("no more pages can be locked")

    if full == "memory":
        monkeypatch.setattr(memory_file, "create", refuse)
    elif sub.rank == sub.size - 1:
        monkeypatch.setattr(device, "page_lock", refuse_lock)
    found = places(sub)
    for n in (5, 3001, 300_001):
        for collective in ("allreduce", "gather", "alltoall"):
            cases.CHECKS[collective](OnDevice(sub), "auto", n, "int64", 0, False)
    assert set().union(*by_argument(found).values()) == {None} and not locked()
    assert len(asked) <= len(memory_file.KINDS)  # in the first call only
    assert any(sub.allgather_object(bool(asked)))
    x = sub.empty(3)  # the user's own is numbered alike
    assert len(set(sub.allgather_object(sub._service.heap.key(x)))) == 1


def test_chunks_that_do_not_fit(make, places):
    """An element for each rank is longer than a chunk, on all ranks; an uneven alltoall is one."""
    sub, device = make("staged", chunk=64), find_device()
    found = places(sub)
    x = np.full(3, sub.rank + 1, "S5000")
    assert (sub.allgather(device.array(x)).get() == sub.allgather(x)).all()
    assert {None} == set().union(*by_argument(found[:3]).values())
    del found[:]
    sends = [2000 * (1 + (r == sub.rank)) for r in range(sub.size)]
    got = sub.alltoall(device.array(np.full(sum(sends), sub.rank)), counts=sends)
    expected = [np.full(2000 * (1 + (r == sub.rank)), r) for r in range(sub.size)]
    assert (got.get() == np.concatenate(expected)).all()
    assert found[-1] == {"x": None, "out": None}
    del found[:]
    assert (sub.allreduce(device.array(np.ones(9))).get() == sub.size).all()
    assert None not in set().union(*by_argument(found).values())


def test_shared_memory_ends_with_the_communicator(make, locked):
    """It is unlocked and unmapped, after the copies from it that were queued."""
    sub, device = make("staged", chunk=16), find_device()
    x = device.array(np.full(9, sub.rank + 1.0))
    sub.allreduce(x, out=x)  # not read here: copies of results are queued
    memory = weakref.ref(owner(sub.gpu._staged._locked))
    sub.free()
    assert not locked()
    assert memory() is None
    assert (x.get() == cases.total(sub.size)).all()


def test_shared_memory_that_nobody_closed(make, locked):
    """It is unlocked with the last reference to it, as of a communicator that nobody freed."""
    sub, device = make("staged"), find_device()
    staged = HostStaged(sub.gpu._service, device, 16)
    x = device.array(np.full(9, sub.rank + 1.0))
    data = as_device_array(x, sub.rank)
    place = sub.rank, sub.size, 0
    call = Call("allreduce", *place, data.dtype, data, data, find_op("sum"), in_place=True)
    staged.serve(call, "auto")
    assert locked() == 1
    del staged
    gc.collect()
    assert not locked()
    assert (x.get() == cases.total(sub.size)).all()


def test_no_shared_memory_without_a_staged_call(make, locked):
    """Nor for one in the background, which has memory of its own."""
    sub, device = make("mpi"), find_device()
    x = device.array(np.ones(9))
    assert (sub.broadcast(x).get() == 1).all()
    assert (sub.iallreduce(x).wait().get() == sub.size).all()
    assert not locked()
    assert (sub.allreduce(x).get() == sub.size).all()
    assert locked()


@pytest.mark.parametrize("warm", [False, True])
def test_mismatch_is_named(make, comm, warm):
    """Of the first staged call, which takes the memory, and of a later one; with a host's too."""
    if comm.size < 2:
        pytest.skip("needs at least 2 ranks")
    device = find_device()
    there, last = device.array(np.ones(3)), comm.size - 1
    mismatches = [
        (lambda sub: sub.allreduce(there, "max"), "allreduce op=(sum|max) 3 x float64"),
        (lambda sub: sub.allgather(there), "(allreduce op=sum 3|allgather [0-9]+) x float64"),
    ]
    if not warm:  # later, short ones of both memories go through slots alike
        host = (lambda sub: sub.allreduce(np.ones(3)), "allreduce op=sum 3 x float64")
        mismatches.append(host)
    for other, words in mismatches:
        sub = make("staged")
        assert (sub.allreduce(there).get() == sub.size).all() if warm else sub.gpu
        with pytest.raises(CollectiveMismatch, match=words):
            sub.allreduce(there) if sub.rank < last else other(sub)
        comm.barrier()


@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_several_nodes(nodes, places, emulated_device, monkeypatch, collective):
    """Of each node's own memory, at one place on all."""
    monkeypatch.setenv("MPIDIST_GPU", "staged")
    monkeypatch.setenv("MPIDIST_GPU_CHUNK_BYTES", "4096")
    found = places(nodes)
    for n in (1, 3001):
        cases.CHECKS[collective](OnDevice(nodes), "auto", n, "int64", nodes.size - 1, n == 1)
    every = [set().union(*by_argument(each).values()) for each in nodes.allgather_object(found)]
    assert None not in set().union(*every)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(make, dtype):
    """Each operation that is defined for it, against the same on the host; and as bytes."""
    sub = make("staged")
    device, numbers = find_device(), np.arange(40) * (sub.rank + 1) % 3 + 1
    x = (numbers % 2 == 0 if dtype.kind == "b" else numbers).astype(dtype)
    for name, op in OPS.items():
        if not op.builtin:
            continue  # for the host only
        if kind_of(dtype) in op.kinds:
            got = sub.allreduce(device.array(x), name, algorithm="linear")
            assert got.dtype == dtype
            assert got.get().tobytes() == sub.allreduce(x, name, algorithm="linear").tobytes(), name
        else:
            with pytest.raises(UnsupportedDtype, match=f"rank {sub.rank}: op='{name}'"):
                sub.allreduce(device.array(x), name)
    for executor in EXECUTORS:
        here = make(executor)
        for call in (here.allgather, here.gather):
            got, expected = call(device.array(x)), call(x)
            assert got is None or got.get().tobytes() == expected.tobytes()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_counts_that_differ(make, executor):
    """Rows of each rank; one rank has none; results are made where they are not given."""
    sub, device = make(executor), find_device()
    p, rank = sub.size, sub.rank
    counts, rows = [3 * r for r in range(p)], sum(3 * r for r in range(p))
    data = np.arange(2.0 * rows).reshape(rows, 2)
    mine = data[sum(counts[:rank]) : sum(counts[: rank + 1])]

    def same(got, expected):
        assert got.shape == expected.shape and np.array_equal(got.get(), expected)

    same(sub.allgather(device.array(mine), counts=counts), data)
    got = sub.gather(device.array(mine), p - 1, counts=counts)
    assert got is None if rank < p - 1 else np.array_equal(got.get(), data)
    same(sub.scatter(device.array(data) if rank == 0 else None, 0, counts=counts), mine)
    same(sub.reduce_scatter(device.array(data * (rank + 1)), counts=counts), mine * cases.total(p))
    sends = [r + rank for r in range(p)]
    values = np.full(sum(sends), rank)
    expected = np.concatenate([np.full(rank + r, r) for r in range(p)])
    same(sub.alltoall(device.array(values), counts=sends), expected)
    same(sub.allreduce(device.array(np.float64(rank))), np.array(float(p * (p - 1) / 2)))


def test_results_are_ordered_on_the_callers_stream(make):
    """What was queued before a call is seen by it; what is queued after it sees the result."""
    sub, device = make("staged", chunk=16), find_device()
    stream = device.new_stream()
    device.use(stream)
    try:
        x = device.array(np.zeros(9))
        x.set(np.full(9, sub.rank + 1.0))  # queued, and not done yet
        sub.allreduce(x, out=x)
        found = []
        device.launch(lambda: found.append(x._memory.copy()), stream)
        assert found == []  # nobody has waited
        device.synchronize(stream)
        assert (found[0] == cases.total(sub.size)).all()
    finally:
        device.use(0)


def test_calls_of_all_kinds_in_turn(make):
    """Slots are used again at once, by longer and shorter arrays, and in the background."""
    sub, device = make("staged", chunk=40), find_device()
    total, works = cases.total(sub.size), []
    for n in (3, 50, 7, 200, 1, 0, 31):
        x = device.array(np.full(n, sub.rank + 1, "i4"))
        works.append((sub.iallreduce(x), n))
        assert (sub.allreduce(x).get() == total).all()
        assert (sub.allgather(x).get() == np.repeat(np.arange(1, sub.size + 1), n)).all()
    for work, n in reversed(works):
        got = work.wait()
        assert got.shape == (n,) and (got.get() == total).all()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_messages(make, executor):
    """Between two devices, and between a device and a host."""
    sub, device = make(executor), find_device()
    if sub.size < 2:
        pytest.skip("needs at least 2 ranks")
    right, left = (sub.rank + 1) % sub.size, (sub.rank - 1) % sub.size
    for n in (0, 1, 1000):
        x, out = device.array(np.full(n, sub.rank, "i2")), device.array(np.full(n, -1, "i2"))
        work = sub.isend(x, right)
        assert sub.recv(out, left) is out and (out.get() == left).all()
        work.wait()
        work, host = sub.isend(x, right, 5), np.empty(n, "i2")
        assert (sub.recv(host, left, 5) == left).all()
        work.wait()
        work, got = sub.isend(x, right, 6), sub.irecv(out, None, 6)  # from any rank
        got.wait()
        work.wait()
        assert got.source == left and (out.get() == left).all()
    with pytest.raises(InvalidArgument, match="null pointer"):
        sub.send(foreign_null(device), right)


def foreign_null(device):
    class Null:
        __cuda_array_interface__ = {"shape": (2,), "typestr": "<f8", "data": (0, False)}

    return Null()


def test_communicators_leave_no_stream(make, comm):
    """One in the background too, whose result is copied while the communicator is freed."""
    device = find_device()
    before, left = device.streams, []
    for n in range(3):
        sub = make("staged", chunk=16)
        works = [sub.iallreduce(device.array(np.full(9, sub.rank + 1.0))) for _ in range(n)]
        assert (sub.allreduce(device.array(np.ones(9))).get() == sub.size).all()
        assert len(device.streams) > len(before)
        sub.free()
        left.append(device.streams)
        assert all((work.wait().get() == cases.total(sub.size)).all() for work in works)
    assert left == 3 * [before]


@pytest.mark.parametrize("executor", [*EXECUTORS, "ipc"])
def test_a_captured_stream_is_refused(make, executor):
    """Before anything is queued or announced, whatever the call; afterwards all goes on."""
    sub, device = make(executor), find_device()
    p, root, stream = sub.size, sub.size - 1, device.new_stream()
    x, whole = device.array(np.ones(2 * p)), device.array(np.ones(2 * p * p))
    there = sub.empty(2 * p, device="cuda") if executor == "ipc" else x
    x_or_none = x if sub.rank == root else None
    calls = {
        "x": [
            lambda: sub.allreduce(x),
            lambda: sub.allreduce(there, out=there),
            lambda: sub.iallreduce(x),
            lambda: sub.broadcast(x, root),
            lambda: sub.allgather(x, whole),
            lambda: sub.alltoall(x),
            lambda: sub.gather(x, root),
            lambda: sub.isend(x, root),
        ],
        "out": [lambda: sub.irecv(x, root), lambda: sub.recv(x, root)],
        "(x|out)": [lambda: sub.scatter(x_or_none, root, out=x[:2])],
    }
    device.use(stream)
    try:
        before = sub._sequencer.sequence
        with device.capture(stream):
            for argument, each in calls.items():
                words = f"^rank {sub.rank}: {argument} is passed while its stream is being captured"
                for call in each:
                    with pytest.raises(InvalidArgument, match=f"{words} into a CUDA graph.*outsi"):
                        call()
        assert sub._sequencer.sequence == before
        assert (sub.allreduce(there, out=there).get() == (0 if executor == "ipc" else p)).all()
        assert sub.broken is None
    finally:
        device.use(0)


def test_what_cannot_be(make, comm):
    """An executor that this library cannot serve is refused on every rank, before any data move."""
    sub, device = make("mpi", MPIDIST_GPU_AWARE="0"), find_device()
    x = device.array(np.ones(3))
    with pytest.raises(Unsupported, match=r"MPIDIST_GPU=mpi: MPIDIST_GPU_AWARE=0 \(rank 0\)"):
        sub.allreduce(x)
    assert sub.allreduce(1) == comm.size  # and all goes on
    sub = make("staged", MPIDIST_GPU_AWARE="1")
    with pytest.raises(Unsupported, match="symmetric"):
        sub.allreduce(x, algorithm="symmetric")
    assert (sub.allreduce(x).get() == comm.size).all()


@pytest.mark.one_node
def test_explain(make):
    """The executors of GPU arrays, why each cannot serve a call, and what runs an algorithm."""
    sub = make("mpi")
    chosen, every = sub.explain("broadcast", 1 << 16, device="cuda")
    assert chosen.name == chosen.executor == "mpi"
    found = {candidate.name: candidate for candidate in every}
    executors = [name for name, candidate in found.items() if candidate.choice is None]
    through = ["staged", "native", "symmetric", "single_copy"]
    assert executors == ["ipc", "nccl", "mpi", "ipc_slots", *through]
    assert found["staged"].can and found["binomial"].can
    for name, words in (
        ("ipc", "MPIDIST_GPU=mpi forces another executor"),
        ("ipc_slots", "MPIDIST_GPU=mpi forces another executor"),
        ("nccl", "emulated device"),
        ("native", "native is mpi"),
        ("symmetric", "out was not allocated by comm.empty()"),
    ):
        assert not found[name].can and words in found[name].why, name
    algorithm = found["binomial"]
    assert algorithm.choice is not None and algorithm.executor == "staged"
    assert algorithm.seconds is None  # the table and the model are about host memory
    assert sub.explain("allreduce", 8, device="cuda")[0].name == "staged"
    without = sub.explain("broadcast", 8, without=("mpi",), device="cuda")
    assert without[0].name == "staged" and without[1][2].why == "excluded by without="
    with pytest.raises(InvalidArgument, match="explain: device='tpu': expected None or 'cuda'"):
        sub.explain("broadcast", 8, device="tpu")
    with pytest.raises(Unsupported, match="MPIDIST_GPU=mpi forces another executor"):
        sub.explain("broadcast", 8, memory="symmetric", device="cuda")
    assert "ipc" not in {candidate.name for candidate in sub.explain("broadcast", 8)[1]}
    sub = make("ipc")
    assert sub.explain("allreduce", 8, memory="symmetric", device="cuda")[0].name == "ipc"
    assert sub.explain("gather", 8, memory="symmetric", device="cuda")[0].name == "mpi"
    with pytest.raises(Unsupported, match="MPIDIST_GPU=ipc: allreduce: out was not allocated"):
        sub.explain("allreduce", 8, device="cuda")


def test_explained_is_served(make):
    """What explain names is what serves such a call, as its trace has it."""
    for executor in ("staged", "mpi", ""):
        sub, device = make(executor), find_device()
        x = device.array(np.ones(sub.size, "f4"))
        for collective, call in (("allreduce", sub.allreduce), ("allgather", sub.allgather)):
            nbytes = x.nbytes if collective == "allreduce" else x.nbytes * sub.size
            chosen, _ = sub.explain(collective, nbytes, device="cuda")
            served = []
            sub._service.note = served.append
            call(x)
            sub._service.note = None
            assert served[0].executor == chosen.executor == chosen.name


def test_a_wrong_environment_on_one_rank(make, comm, monkeypatch):
    """Every rank is told whose it is, and when it is mended all goes on."""
    last = comm.size - 1
    sub = make(chunk="many" if comm.rank == last else 64)
    x = find_device().array(np.ones(4))
    words = rf"rank {sub.rank}: error on rank {last}: MPIDIST_GPU_CHUNK_BYTES='many': expected a"
    with pytest.raises(ConfigError, match=words):
        sub.allreduce(x)
    monkeypatch.setenv("MPIDIST_GPU_CHUNK_BYTES", "64")
    assert (sub.allreduce(x).get() == sub.size).all()


class OutOfMemoryError(RuntimeError):
    """As PyTorch's; cupy's is a MemoryError."""


@pytest.mark.parametrize("error", [OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("where", [*EXECUTORS, "ipc", "host"])
def test_a_rank_without_memory_for_its_result(make, monkeypatch, where, error):
    """Its error is the library's own; the others are told whose it is at once, and all goes on."""
    sub, device = make("" if where == "host" else where), find_device()
    if sub.size < 2:
        pytest.skip("needs at least 2 ranks")
    x, last = np.ones(sub.size), sub.size - 1
    if where != "host":
        x = device.array(x) if where != "ipc" else sub.empty(sub.size, device="cuda")

    def fails(*arguments):
        raise error("all is in use")

    def expected(words):
        if sub.rank == last:
            return pytest.raises(error, match="^all is in use$")
        return pytest.raises(CollectiveMismatch, match=f"{words} on rank {last}")

    for call in (sub.reduce_scatter, sub.alltoall, sub.ireduce_scatter):
        begins = call == sub.ireduce_scatter
        told = rf"{call.__name__.removeprefix('i')} without memory \(all is in use\)"
        with (
            monkeypatch.context() as patch,
            expected(f"({told}|a different one)" if begins else told),
        ):
            if sub.rank == last:
                patch.setattr(np if where == "host" else device, "empty", fails)
            call(x).wait() if begins else call(x)
        if not begins:  # in the background other ranks may have begun, and then nothing goes on
            assert sub.allreduce(1) == sub.size


def test_debug_tells_a_gpu_from_a_host(make, comm):
    if comm.size < 2:
        pytest.skip("needs at least 2 ranks")
    make("staged")
    sub, x = Communicator(comm.backend.split(0, comm.rank), debug=True), np.ones(3)
    there = find_device().array(x)
    assert (sub.allreduce(there).get() == comm.size).all()
    with pytest.raises(CollectiveMismatch, match="on a GPU"):
        sub.allreduce(there if sub.rank else x)
    assert (sub.allreduce(there).get() == comm.size).all()
    sub.free()


def test_bench_of_every_executor(comm, emulated_device):
    """What can be is measured and right, and what cannot be says why; as `bench gpu`."""
    from mpidist.bench.gpu import GPU_COLLECTIVES, measure_copies, measure_executors

    copies = measure_copies(comm, 4096)
    results = measure_executors(comm, GPU_COLLECTIVES, (0, 4096), np.dtype("f4"), 1, copies)
    every = [*results.rows, *results.unsupported]
    assert len(every) == 2 * len(GPU_COLLECTIVES) * len(NAMES) and results.correct
    found = {(row.work, row.candidate): row for row in results.rows if row.bytes}
    refused = {(r.work, r.candidate): r.reason for r in results.unsupported if r.bytes}
    for name in GPU_COLLECTIVES:
        assert found[name, "ipc"].time_us > 0 and found[name, "staged"].time_us > 0
        assert "emulated device" in refused[name, "nccl"]
        assert ((name, "mpi") in refused) == (name in CLASSES["reductions"])
    for executor in ("ipc", "staged"):
        assert found["allreduce", executor].figures["of_copies"] > 0
    assert "MPIDIST_GPU" not in os.environ
