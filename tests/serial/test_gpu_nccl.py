"""NCCL's calls as they are made: with a library of our own in its place, on the emulated device.

NCCL itself was never run.  What is shown is what reaches it: addresses, counts, numbers of dtypes
and operations, the stream, and what is refused before it is asked.
"""

import ctypes

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist.device.find import find_device
from mpidist.device.recognise import describe
from mpidist.errors import (
    CollectiveTimeout,
    CommunicationError,
    InvalidArgument,
    Unsupported,
    UnsupportedDtype,
)
from mpidist.gpu import nccl_calls as calls
from mpidist.gpu.nccl import NcclBackend, load
from mpidist.gpu.nccl_types import DTYPES, OPS

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
        return self.made[-1]


class Fake:
    """A communicator that does at once what NCCL would queue, on memory that it is told of."""

    def __init__(self, comm):
        self.comm, self.ended, self.trouble = comm, "", None

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

    def check_async_error(self):
        if self.trouble is not None:
            raise self.trouble

    def abort(self):
        self.ended = "aborted"

    def destroy(self):
        self.ended = "destroyed"


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("MPIDIST_GPU_DEVICE", "host")
    # The ranks are threads of one process, whose device has one name.
    monkeypatch.setattr(
        "mpidist.device.emulated.EmulatedDevice.identity", lambda self: f"uuid-{id(self)}"
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
            describe(x, 0),
            describe(out, 0) if comm.rank == 1 else None,
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
        with pytest.raises(InvalidArgument, match="root=2: allowed are 0 … 1"):
            calls.nccl_broadcast(x, backend, 2)

    mpidist.run_simulated(2, on_rank)


def test_before_it_starts(monkeypatch):
    """Every rank is told, and NCCL was not asked for a communicator."""

    def old_on_one(comm):
        library = Library(comm, 20803 if comm.rank == 1 else 22703)
        with pytest.raises(Unsupported, match=r"rank 1: NCCL 2.8.3 is too old: needed is 2.10.0"):
            NcclBackend(comm, library)
        return library.made

    assert mpidist.run_simulated(3, old_on_one) == [[], [], []]
    monkeypatch.setattr("mpidist.device.emulated.EmulatedDevice.identity", lambda self: "GPU-7")

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
        with pytest.raises(CommunicationError, match="remote process exited; aborted"):
            backend.wait(0)
        assert library.made[0].ended == "aborted"
        backend = NcclBackend(comm, library)
        monkeypatch.setattr("mpidist.device.emulated_stream.EmulatedEvent.done", lambda self: False)
        with pytest.raises(CollectiveTimeout, match="NCCL has not finished within 0.01 s"):
            backend.wait(0, 0.01)
        assert library.made[1].ended == "aborted"

    mpidist.run_simulated(1, on_rank)


def test_without_nccl():
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
