"""NCCL's calls as they are made: with a library of our own in its place, on the emulated device.

NCCL itself was never run.  What is shown is what reaches it: addresses, counts, numbers of dtypes
and operations, the stream, and what is refused before it is asked.
"""

import ctypes
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist.calls.call import Call
from mpidist.device.find import find_device, install_device
from mpidist.device.recognise import as_device_array
from mpidist.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicationError,
    CommunicatorBroken,
    InvalidArgument,
    UnknownName,
    Unsupported,
    UnsupportedDtype,
)
from mpidist.gpu.heap import DeviceHeap
from mpidist.gpu.nccl import calls, schedules
from mpidist.gpu.nccl.backend import DTYPES, OPS, NcclBackend, load
from mpidist.gpu.nccl.executor import Nccl
from mpidist.gpu.nccl.schedules import why_stuck
from mpidist.operations import OPS as PREDEFINED
from mpidist.schedule.registry import algorithm, algorithms, find, unregister
from mpidist.schedule.rounds import Copy, Reduce, Send
from mpidist.schedule.unrolled import materialise
from tests.support import collectives as cases
from tests.support.gpu_cases import OnDevice, compare_replicas, train, train_alone

NUMPY = {code: np.dtype(ml_dtypes.bfloat16 if n == "bfloat16" else n) for n, code in DTYPES.items()}
NAMES = {code: name for name, code in OPS.items()}


class NcclError(RuntimeError):
    pass


class Library:
    """As much of ``cupy.cuda.nccl`` as is used; the ranks are threads."""

    NcclError = NcclError

    def __init__(self, comm, version=22703):
        self.comm, self.version, self.made = comm, version, []

    def get_version(self):
        return self.version

    def get_unique_id(self):
        assert self.comm.rank == 0, "rank 0 makes the id, and the others are told"
        return ("id", 4711)

    def NcclCommunicator(self, size, unique, rank):
        assert unique == ("id", 4711) and (size, rank) == (self.comm.size, self.comm.rank)
        self.made.append(Fake(self.comm))
        self.made[-1].library = self
        return self.made[-1]

    # -- messages: those of a group are under way together, and each waits for its other end

    depth, queued = 0, ()

    def groupStart(self):
        self.depth += 1

    def groupEnd(self):
        self.depth -= 1
        if not self.depth:
            sends = [(memory(), peer) for memory, peer, out in self.queued if out]
            works = [self.comm.isend(data, peer) for data, peer in sends]
            for memory, peer, out in self.queued:
                if not out:
                    self.comm.recv(memory(), peer)
            for work in works:
                work.wait()
            self.queued = ()
            self.groups += 1

    groups = 0

    def message(self, memory, peer, out, stream):
        assert self.depth, "a message alone would wait for a peer that waits as well"
        find_device().synchronize(stream)
        self.queued += ((memory, peer, out),)


class Fake:
    """A communicator that does at once what NCCL would queue, on memory that it is told of."""

    def __init__(self, comm):
        self.comm, self.ended, self.trouble = comm, "", None
        self.library: Library

    def _at(self, pointer, count, code):
        dtype = NUMPY[code]
        if not count:
            return np.empty(0, dtype)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        return np.frombuffer(memory, dtype)

    def allReduce(self, source, target, count, code, op, stream):
        find_device().synchronize(stream)
        x = self._at(source, count, code)
        self._at(target, count, code)[...] = self.comm.allreduce(x, NAMES[op])

    def reduce(self, source, target, count, code, op, root, stream):
        find_device().synchronize(stream)
        got = self.comm.reduce(self._at(source, count, code), NAMES[op], root)
        if got is not None:
            self._at(target, count, code)[...] = got

    def broadcast(self, source, target, count, code, root, stream):
        find_device().synchronize(stream)
        mine = self._at(source if self.comm.rank == root else target, count, code).copy()
        self._at(target, count, code)[...] = self.comm.broadcast(mine, root)

    def allGather(self, source, target, count, code, stream):
        find_device().synchronize(stream)
        x = self._at(source, count, code)
        self._at(target, count * self.comm.size, code)[...] = self.comm.allgather(x)

    def reduceScatter(self, source, target, count, code, op, stream):
        find_device().synchronize(stream)
        x = self._at(source, count * self.comm.size, code)
        self._at(target, count, code)[...] = self.comm.reduce_scatter(x, NAMES[op])

    def send(self, source, count, code, peer, stream):
        self.library.message(lambda: self._at(source, count, code).copy(), peer, True, stream)

    def recv(self, target, count, code, peer, stream):
        self.library.message(lambda: self._at(target, count, code), peer, False, stream)

    def check_async_error(self):
        if self.trouble is not None:
            raise self.trouble

    def abort(self):
        self.ended = "aborted"

    def destroy(self):
        self.ended = "destroyed"


@pytest.fixture(autouse=True)
def emulated(emulated_device, monkeypatch):
    monkeypatch.setattr(emulated_device, "nccl", True)
    # The ranks are threads of one process, whose device has one name.
    monkeypatch.setattr(
        "tests.support.emulated.EmulatedDevice.identity", lambda self: f"uuid-{id(self)}"
    )


@pytest.mark.parametrize("name", [*DTYPES, "complex64"])
def test_every_function(name):
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    def on_rank(comm):
        backend, device, p = NcclBackend(comm, Library(comm)), find_device(), comm.size
        total = p * (p + 1) // 2
        data = np.arange(6).astype(dtype)
        x = device.array(data * dtype.type(comm.rank + 1))
        calls.nccl_allreduce(x, backend)
        assert (x.get() == data * dtype.type(total)).all()
        x, out = device.array(data), device.array(np.zeros(6, dtype))
        backend.reduce(
            as_device_array(x, 0),
            as_device_array(out, 0) if comm.rank == 1 else None,
            "max" if dtype.kind != "c" else "sum",
            1,
        )
        assert (
            out.get() == (data * dtype.type(p if dtype.kind == "c" else 1) if comm.rank == 1 else 0)
        ).all()
        x = device.array(np.full(4, comm.rank + 1, dtype))
        calls.nccl_broadcast(x, backend, p - 1)
        assert (x.get() == dtype.type(p)).all()
        x, out = device.array(np.full(2, comm.rank, dtype)), device.empty((2 * p,), dtype)
        calls.nccl_all_gather(x, out, backend)
        assert np.array_equal(out.get(), np.repeat(np.arange(p), 2).astype(dtype))
        x, out = device.array(np.arange(2 * p).astype(dtype)), device.empty((2,), dtype)
        calls.nccl_reduce_scatter(x, out, backend)
        mine = np.arange(2 * p).astype(dtype)[2 * comm.rank : 2 * comm.rank + 2]
        assert (out.get() == mine * dtype.type(p)).all()
        backend.close()
        with pytest.raises(InvalidArgument, match="was closed or aborted"):
            calls.nccl_allreduce(out, backend)

    mpidist.run_simulated(3, on_rank)


def test_explicit_dtypes():
    def on_rank(comm):
        backend, device = NcclBackend(comm, Library(comm)), find_device()
        x = device.array(np.full(4, 1.5, "f4").view("u4"))
        calls.nccl_allreduce_dtype(x, backend, "sum", "float32")
        assert (x.get().view("f4") == 3.0).all()
        for call in (
            lambda: calls.nccl_allreduce_dtype(x, backend, "sum", "float64"),
            lambda: calls.nccl_broadcast_dtype(x, backend, 0, "int8"),
            lambda: calls.nccl_all_gather_dtype(x, x, backend, "float16"),
            lambda: calls.nccl_reduce_scatter_dtype(x, x, backend, "sum", "int64"),
        ):
            with pytest.raises(InvalidArgument, match="has elements of 4 bytes.*same width"):
                call()

    mpidist.run_simulated(2, on_rank)


def test_what_is_refused():
    def on_rank(comm):
        backend, device = NcclBackend(comm, Library(comm)), find_device()
        x = device.array(np.ones(4))
        for buffer, op, error, words in (
            (device.array(np.ones(2, "i2")), "sum", UnsupportedDtype, "NCCL has no 'sum' of int16"),
            (device.array(np.ones(2, ">f4")), "max", UnsupportedDtype, "NCCL has no 'max' of >f4"),
            (
                device.array(np.ones(2, "c8")),
                "prod",
                UnsupportedDtype,
                "NCCL has no 'prod' of complex64",
            ),
            (x, "xor", UnsupportedDtype, "NCCL has no 'xor'; it has sum, prod, max, min, mean"),
        ):
            with pytest.raises(error, match=f"rank {comm.rank}: {words}"):
                calls.nccl_allreduce(buffer, backend, op)
        with pytest.raises(InvalidArgument, match="3 elements are not 2 times 4"):
            calls.nccl_all_gather(x, x[:3], backend)
        with pytest.raises(InvalidArgument, match="send has dtype float64, recv has int64"):
            calls.nccl_reduce_scatter(x, device.array(np.arange(2)), backend)
        for root in (2, -1, True, 0.0, None, "0"):
            words = f"root={root!r} is not a rank: expected 0 … 1"
            with pytest.raises(InvalidArgument, match=words):
                calls.nccl_broadcast(x, backend, root)
        for op in (None, ["sum"], np.add):
            with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: op=.*expected one"):
                calls.nccl_allreduce(x, backend, op)
            with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: op=.*expected one"):
                calls.nccl_reduce_scatter(x, x[:2], backend, op)

    mpidist.run_simulated(2, on_rank)


def of_every_call(x, backend):
    """Each free function with `x` as its input; (the argument's name, the call)."""
    there = find_device().array(np.ones(4))
    yield "buffer", lambda: calls.nccl_allreduce(x, backend)
    yield "buffer", lambda: calls.nccl_broadcast(x, backend)
    yield "send", lambda: calls.nccl_all_gather(x, there, backend)
    yield "recv", lambda: calls.nccl_all_gather(there, x, backend)
    yield "send", lambda: calls.nccl_reduce_scatter(x, there, backend)
    yield "recv", lambda: calls.nccl_reduce_scatter(there, x, backend)
    yield "buffer", lambda: calls.nccl_allreduce_dtype(x, backend, "sum", "f8")
    yield "buffer", lambda: calls.nccl_broadcast_dtype(x, backend, 0, "f8")
    yield "send", lambda: calls.nccl_all_gather_dtype(x, there, backend, "f8")
    yield "send", lambda: calls.nccl_reduce_scatter_dtype(x, there, backend, "sum", "f8")


def test_what_is_no_array_on_the_device():
    def on_rank(comm):
        backend = NcclBackend(comm, Library(comm))
        for x, kind in ((np.ones(4), "ndarray"), ([1.0], "list"), (None, "NoneType"), (2, "int")):
            for argument, call in of_every_call(x, backend):
                words = f"rank {comm.rank}: {argument} is a {kind} that is not on a GPU"
                with pytest.raises(InvalidArgument, match=words):
                    call()
        x = find_device().array(np.ones(4))
        for wrong in (None, comm):
            for _, call in of_every_call(x, wrong):
                words = f"backend is a {type(wrong).__name__}; expected an NcclBackend"
                with pytest.raises(InvalidArgument, match=words):
                    call()
        with pytest.raises(InvalidArgument, match="dtype='flaot32': expected a dtype of numpy"):
            calls.nccl_allreduce_dtype(x, backend, "sum", "flaot32")
        assert np.array_equal(x.get(), np.ones(4))

    mpidist.run_simulated(2, on_rank)


def test_before_it_starts(monkeypatch):
    """Every rank is told, and NCCL was not asked for a communicator."""

    def old_on_one(comm):
        library = Library(comm, 20803 if comm.rank == 1 else 22703)
        with pytest.raises(Unsupported, match=r"rank 1: NCCL 2.8.3 is too old: needed is 2.10.0"):
            NcclBackend(comm, library)
        return library.made

    assert mpidist.run_simulated(3, old_on_one) == [[], [], []]
    monkeypatch.setattr("tests.support.emulated.EmulatedDevice.identity", lambda self: "GPU-7")

    def one_device(comm):
        library = Library(comm)
        with pytest.raises(Unsupported, match="ranks 0, 1 are all on GPU GPU-7 of .*CUDA_VISIBLE"):
            NcclBackend(comm, library)
        return library.made

    assert mpidist.run_simulated(2, one_device) == [[], []]


def test_errors_and_deadlines_abort(monkeypatch):
    def on_rank(comm):
        library = Library(comm)
        backend = NcclBackend(comm, library)
        backend.wait(0)
        library.made[0].trouble = KeyError(7)  # cupy has no name for "in progress"
        backend.wait(0)
        library.made[0].trouble = NcclError("remote process exited")
        with pytest.raises(CommunicationError, match="remote process exited; NCCL was aborted"):
            backend.wait(0)
        assert library.made[0].ended == "aborted"
        backend = NcclBackend(comm, library)
        monkeypatch.setattr("tests.support.emulated.EmulatedEvent.done", lambda self: False)
        with pytest.raises(CollectiveTimeout, match="NCCL has not finished within 0.01 s"):
            backend.wait(0, 0.01)
        assert library.made[1].ended == "aborted"

    mpidist.run_simulated(1, on_rank)


# -- as the executor that collectives take by themselves


@pytest.fixture
def by_nccl(monkeypatch):
    """Runs a function on ranks whose collectives on a device find the library above."""
    local = threading.local()
    monkeypatch.setattr("mpidist.gpu.nccl.backend.load", lambda: local.library)
    monkeypatch.setattr("tests.support.emulated.EmulatedDevice.identity", lambda self: local.uuid)

    def run(size, function, forced=""):
        monkeypatch.setenv("MPIDIST_GPU", forced)

        def on_rank(comm):
            local.uuid = f"GPU-{comm.rank}"
            local.library = Library(comm.split(0))
            found = function(comm, local.library)
            broken = comm.broken  # then it is aborted at the end of the process
            comm.free()
            ended = (made.ended in ("destroyed", "aborted") for made in local.library.made)
            assert broken or all(ended)
            return found

        return mpidist.run_simulated(size, on_rank)

    return run


@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_collectives_by_themselves(by_nccl, collective):
    """Every collective, blocking and in the background, in place and not; only scans are staged."""
    staged = collective in ("scan", "exscan")

    def check(comm, library):
        for number, n in enumerate([*cases.lengths(comm.size), 8]):
            for in_place in (False, True):
                for background in (False, True):
                    there = OnDevice(comm, background)
                    root = (number + in_place) % comm.size
                    cases.CHECKS[collective](there, "auto", n, "int64", root, in_place)
        assert comm.gpu.uses_nccl and len(library.made) == (not staged)
        return library.groups

    groups = by_nccl(3, check)
    assert all(groups) == (collective in ("gather", "scatter", "alltoall"))


def test_what_nccl_does_not_serve_is_staged(by_nccl):
    def check(comm, library):
        device = find_device()
        x = device.array(np.full(4, comm.rank + 1, "i2"))
        assert (comm.allreduce(x).get() == 3).all() and not library.made
        with pytest.raises(Unsupported, match="allreduce 'native': .*NCCL has no 'sum' of int16"):
            comm.allreduce(x, algorithm="native")
        nan = device.array(np.array([1.0, np.nan if comm.rank else 1.0]))
        with pytest.raises(Unsupported, match="'native': NCCL does not say what the max of NaN is"):
            comm.allreduce(nan, "max", algorithm="native")
        for op in ("max", "min"):
            assert np.isnan(comm.allreduce(nan, op).get()).tolist() == [False, True]
        assert not library.made
        got = comm.reduce_scatter(device.array(np.ones(3)), counts=[1, 2])
        assert got.get().tolist() == [2.0] * (comm.rank + 1) and not library.made
        rows = device.array(np.full(comm.rank + 1, comm.rank))
        assert comm.allgather(rows, counts=[1, 2]).get().tolist() == [0, 1, 1] and library.groups

    by_nccl(2, check)


def test_executors_by_name(by_nccl):
    """A call takes the executor that it names, or says why it cannot."""

    def check(comm, library):
        x = find_device().array(np.ones(4))
        assert (comm.allreduce(x, algorithm="staged").get() == 2).all() and not library.made
        for name, words in (
            ("mpi", "NCCL is in use|messages do not go by MPI here"),
            ("ipc", "the ranks are threads"),
            ("symmetric", "the simulated backend has no shared memory"),
            ("single_copy", "the simulated backend has no shared memory"),
            ("in_place", "the ranks are threads"),
            ("slots", "its arrays are on a GPU"),
        ):
            with pytest.raises(Unsupported, match=f"allreduce '{name}': {words}.*; able .*nccl"):
                comm.allreduce(x, algorithm=name)
        assert not library.made
        assert (comm.iallreduce(x, algorithm="nccl").wait().get() == 2).all() and library.made
        with pytest.raises(UnknownName, match="'magic'"):
            comm.allreduce(x, algorithm="magic")
        with pytest.raises(UnknownName, match="'nccl'"):  # on the host there is none
            comm.allreduce(np.ones(4), algorithm="nccl")

    by_nccl(2, check)
    by_nccl(2, check, "nccl")


def test_explain(by_nccl):
    def check(comm, library):
        chosen, every = comm.explain("allreduce", 64, device="cuda")
        found = {candidate.name: candidate for candidate in every}
        assert chosen.name == "nccl" and not library.made
        assert found["ring"].executor == "nccl" and found["ring"].can
        assert not found["native"].can and found["native"].why.endswith("native is nccl")
        assert comm.explain("scan", 64, device="cuda")[0].name == "staged"
        with pytest.raises(Unsupported, match="threads|no shared memory"):
            comm.explain("allreduce", 64, memory="symmetric", device="cuda")

    by_nccl(2, check)


def test_native_is_that_of_nccl_in_the_background_too(by_nccl):
    def check(comm, library):
        x = find_device().array(np.ones(4, "i2"))
        with pytest.raises(Unsupported, match="allreduce 'native': .*NCCL has no 'sum' of int16"):
            comm.iallreduce(x, algorithm="native")
        with pytest.raises(Unsupported, match="scan 'native': NCCL has no scan"):
            comm.scan(x, algorithm="native")
        assert not library.made
        assert (comm.iallreduce(x, algorithm="ring").wait().get() == 2).all() and not library.made

    by_nccl(2, check)


def test_symmetric_arrays_in_the_background(emulated_device):
    """By "auto" they go through the host, by "native" to NCCL; private ones to NCCL."""
    device, alone = find_device(), lambda value: [value]
    heap, service = DeviceHeap(device, 0, 1, alone), SimpleNamespace(groups=((0,),))
    nccl = Nccl(None, service, alone, heap)
    for symmetric in (True, False):
        x = heap.empty((4,), np.dtype("f4")) if symmetric else device.array(np.ones(4, "f4"))
        data = as_device_array(x, 0)
        call = Call("allreduce", 0, 1, 0, data.dtype, data, data, PREDEFINED["sum"])
        assert nccl.why_not(call, "auto", False) is nccl.why_not(call, "native", True) is None
        reason = nccl.why_not(call, "auto", True)
        assert "through the host" in reason if symmetric else reason is None
    heap.close()


@pytest.mark.parametrize("size", [2, 5])
def test_written_schedules_over_its_messages(by_nccl, size):
    """All that there are, in place and not, with the bits that they have on the host."""

    def check(comm, library):
        served = 0
        for found in algorithms():
            name = found.collective
            if name not in cases.CHECKS or found.requires is not None:
                continue
            for n, in_place in ((1, True), (size + 1, False), (33, True)):
                if not found.equal_blocks or n % size == 0:
                    there = OnDevice(comm)
                    cases.CHECKS[name](there, found.name, n, "float32", size - 1, in_place)
            served += 1
        x = np.random.default_rng(comm.rank).normal(size=1001)
        for name in ("ring", "recursive_doubling", "tree:3"):
            for op in ("mean", "prod"):
                mine = comm.allreduce(find_device().array(x), op, algorithm=name).get()
                assert mine.tobytes() == comm.allreduce(x, op, algorithm=name).tobytes(), name
            half = np.linspace(-1, 1, 1001, dtype="f2") * np.float16(65000)
            mine = comm.allreduce(find_device().array(half), "mean", algorithm=name).get()
            assert mine.tobytes() == comm.allreduce(half, "mean", algorithm=name).tobytes(), name
            assert np.allclose(mine, half, rtol=0.01), name  # nor has it overflowed
        return served, library.groups

    (served, groups), *_ = by_nccl(size, check)
    assert served > 20 and groups > served


def test_a_schedule_that_nccl_would_wait_in(by_nccl):
    """It sends in one round what is received in the next: MPI keeps that, NCCL does not."""

    def late(rank, size):
        peer = 1 - rank
        yield Send(peer, blocks=0)
        yield Reduce(peer, blocks=0)

    def check(comm, library):
        with pytest.raises(
            Unsupported, match="'late': NCCL does not buffer messages: ranks 0, 1 would"
        ):
            comm.allreduce(find_device().array(np.ones(4)), algorithm="late")
        assert (comm.allreduce(find_device().array(np.ones(4))).get() == 2).all()

    algorithm("allreduce", "late", blocks=1)(late)
    try:
        by_nccl(2, check)
    finally:
        unregister("allreduce", "late")


def test_a_round_is_a_group(by_nccl):
    """Rounds that only copy are none, and a schedule is written down once, whatever the array."""
    played = []

    def counted(rank, size):
        played.append(rank)
        yield Copy((0, 1), (0, 1), "out", "tmp")
        for block in (0, 1):
            yield Send(1 - rank, blocks=block), Reduce(1 - rank, blocks=block)

    def check(comm, library):
        for n in (5, 8):
            x = find_device().array(np.arange(n) + comm.rank)
            before = library.groups
            got = comm.allreduce(x, algorithm="counted")
            assert (got.get() == 2 * np.arange(n) + 1).all()
            assert library.groups - before == 2
        return played.count(comm.rank)

    algorithm("allreduce", "counted", blocks=2)(counted)
    try:
        for rank_played in by_nccl(2, check):
            # by each rank for itself, and by both to see that it does not wait for itself
            assert rank_played <= 4
    finally:
        unregister("allreduce", "counted")


def test_what_is_known_of_schedules_is_limited():
    for arity in range(2, 302):
        assert schedules._why_stuck(find("allreduce", "tree").algorithm, 2, 0, arity, ()) is None
    assert schedules._why_stuck.cache_info().currsize < 300


def test_no_shipped_schedule_waits_for_itself():
    for found in algorithms():
        for size in (2, 3, 4, 7, 8):
            groups = (tuple(range(size // 2)), tuple(range(size // 2, size)))
            if found.unsupported(size, groups=groups) is None:
                every = [
                    materialise(found.schedule(r, size, size - 1, 3, groups)) for r in range(size)
                ]
                assert why_stuck(every) is None, found


def test_background_calls_wait_on_streams(by_nccl):
    def check(comm, library):
        device = find_device()
        stream = device.new_stream()
        device.use(stream)
        x = device.array(np.zeros(5))
        x += comm.rank + 1.0  # queued
        work = comm.iallreduce(x, "mean", out=x)
        assert work.wait() is x
        x *= 2.0
        assert (x.get() == 3.0).all() and work.done
        device.use(0)

    by_nccl(2, check)


@pytest.mark.parametrize("first", ["test", "wait", "watch"])
def test_background_calls_are_compared(by_nccl, monkeypatch, first):
    """Both ranks are told of the two calls, and neither waits for the deadline in NCCL."""
    queued = []
    for name in ("allReduce", "reduce"):
        monkeypatch.setattr(Fake, name, lambda self, *_, name=name: queued.append(name))

    def check(comm, library):
        beside, x = comm.split(0), find_device().array(np.ones(3))
        work = comm.iallreduce(x, "sum", out=x)
        work.wait()
        number = comm.backend.board.reached(comm.rank)
        assert number and comm.gpu._nccl.queue.watch.poll() is False
        beside.barrier()
        monkeypatch.setattr("tests.support.emulated.EmulatedEvent.done", lambda self: False)
        if comm.rank == 0:
            late = comm.iallreduce(x, "sum", out=x)
            assert not late.test() and comm.gpu._nccl.queue.watch.poll()
            beside.send(np.ones(1), 1)
            beside.recv(np.ones(1), 1)
            if first == "watch":
                assert not comm.gpu._nccl.queue.watch.poll()
                assert library.made[0].ended == "aborted"
                for call in (late.test, late.wait, comm.barrier):
                    with pytest.raises(CommunicatorBroken, match="CollectiveMismatch.*different"):
                        call()
            else:
                with pytest.raises(CollectiveMismatch, match="allreduce op=sum.* and a differ"):
                    getattr(late, first)()
        else:
            beside.recv(np.ones(1), 0)
            with pytest.raises(CollectiveMismatch, match="reduce op=sum root=0.* and a differ"):
                comm.ireduce(x, "sum", out=x)
            beside.send(np.ones(1), 0)
        assert comm.broken is not None and comm.backend.board.reached(comm.rank) > number

    by_nccl(2, check, "nccl")
    assert sorted(queued) == ["allReduce"] * 3


@pytest.mark.parametrize("trouble", ["deadline", "error"])
def test_abort_after_the_deadline(by_nccl, monkeypatch, trouble):
    """Whoever waits for its stream is let go, and the communicator says why from then on."""

    def check(comm, library):
        comm.timeout = 0.001 if trouble == "deadline" else 60.0
        device = find_device()
        x = device.array(np.ones(3))
        comm.allreduce(x)
        gpu = comm.gpu
        assert not gpu._nccl.queue.watch.poll()  # it has ended
        comm.allreduce(x)
        monkeypatch.setattr("tests.support.emulated.EmulatedEvent.done", lambda self: False)
        words = "NCCL has not finished .*allreduce.* by its deadline; .*aborted"
        if trouble == "error":
            library.made[0].trouble = NcclError("remote process exited")
            words = "NCCL reports: remote process exited; NCCL was aborted"
        while gpu._nccl.queue.watch.poll():
            pass
        assert library.made[0].ended == "aborted"
        with pytest.raises(CommunicatorBroken, match=f"{words}; create a new one"):
            comm.allreduce(x)

    by_nccl(1, check, "nccl")


def test_forced(by_nccl, monkeypatch):
    """It is refused with the reason where it cannot be, on every rank; and says what it takes."""

    def candidates(comm, library):
        comm.allreduce(find_device().array(np.ones(3)))
        return {(c.operations, c.name): (c.taken, c.why) for c in comm.gpu.candidates}

    found = by_nccl(2, candidates, "nccl")[0]
    assert found["reductions", "nccl"] == (True, "MPIDIST_GPU=nccl forces it")
    assert by_nccl(2, candidates)[1]["movement", "nccl"] == (
        True,
        "every rank has a GPU of its own",
    )
    monkeypatch.setattr("tests.support.emulated.EmulatedDevice.identity", lambda self: "GPU-7")

    def refused(comm, library):
        words = "MPIDIST_GPU=nccl: ranks 0, 1 are all on GPU GPU-7 of "
        with pytest.raises(Unsupported, match=words):
            comm.allreduce(find_device().array(np.ones(3)))

    by_nccl(2, refused, "nccl")
    assert by_nccl(2, candidates)[0]["reductions", "staged"][0]


def test_gradients_by_nccl(by_nccl):
    """DDP sends its buckets while backward goes on, on a stream beside it."""

    def check(comm, library):
        got, ddp = train(comm, "ddp")
        compare_replicas(comm, got)
        for mine, alone in zip(got, train_alone(comm.size, "ddp"), strict=True):
            np.testing.assert_allclose(mine, alone, rtol=1e-9, atol=1e-12)
        assert ddp.stats().overlap == "polls" and library.made
        ddp.reducer.comm.free()

    by_nccl(2, check)


def test_without_nccl():
    install_device(None)
    try:
        import cupy  # noqa: F401
    except ImportError:
        with pytest.raises(Unsupported, match="NCCL cannot be imported.*pip install"):
            load()
    else:
        try:
            assert load().get_version() > 0
        except Unsupported as error:
            assert "nvidia-nccl" in str(error)
