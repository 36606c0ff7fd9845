"""Calls of NCCL as they are made, on the emulated device; what is refused before and after."""

import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist.device.find import find_device, install_device
from mpidist.device.recognise import as_device_array
from mpidist.errors import (
    CollectiveTimeout,
    CommunicationError,
    InvalidArgument,
    Unsupported,
    UnsupportedDtype,
)
from mpidist.gpu.nccl import calls
from mpidist.gpu.nccl.backend import DTYPES, NcclBackend, load
from tests.support import jobs, processes
from tests.support.nccl import Library, NcclError


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


@pytest.mark.parametrize(
    "version, told, shares", [(23003, "1", True), (22907, "1", False), (23003, "0", False)]
)
def test_ranks_on_one_gpu(monkeypatch, version, told, shares):
    """NCCL 2.30.3 takes them, if it is told to on all ranks."""
    monkeypatch.setattr("tests.support.emulated.EmulatedDevice.identity", lambda self: "GPU-7")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", told)

    def on_rank(comm, other=version):
        library = Library(comm, other if comm.rank else version)
        if shares and other == version:
            NcclBackend(comm, library).close()
        else:
            with pytest.raises(Unsupported, match="ranks 0, 1 are all on GPU GPU-7 .*2.30.3"):
                NcclBackend(comm, library)
        return len(library.made)

    assert mpidist.run_simulated(2, on_rank) == [shares, shares]
    assert mpidist.run_simulated(2, lambda comm: on_rank(comm, 22000)) == [0, 0]


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


@pytest.mark.parametrize("call", ["allReduce", "check_async_error"])
@pytest.mark.parametrize("returns", [True, False])
def test_abort_beside_a_call_of_another_thread(monkeypatch, call, returns):
    """It frees what the call uses, so that returns first, unless it waits for the abort."""
    monkeypatch.setattr("mpidist.gpu.nccl.backend.ABORT_AFTER", 20.0 if returns else 0.05)

    def on_rank(comm):
        backend = NcclBackend(comm, Library(comm))
        made, inside, aborted = backend._nccl, threading.Event(), threading.Event()
        ended = []

        def slow(*_):
            inside.set()
            ended.append(aborted.wait(0.3 if returns else 20))

        monkeypatch.setattr(made, call, slow)
        monkeypatch.setattr(made, "abort", aborted.set)
        x = as_device_array(find_device().array(np.ones(4)), 0)
        use = (
            backend.check if call == "check_async_error" else lambda: backend.allreduce(x, x, "sum")
        )
        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        assert inside.wait(20)
        backend.abort()
        thread.join(20)
        assert aborted.is_set() and ended == [not returns]
        with pytest.raises(InvalidArgument, match="was closed or aborted"):
            backend.check()

    mpidist.run_simulated(1, on_rank)


AT_EXIT = """
import mpidist
from mpidist.device.find import install_device
from mpidist.gpu.nccl.backend import NcclBackend
from tests.support.emulated import EmulatedDevice
from tests.support.nccl import Fake, Library

install_device(EmulatedDevice)
EmulatedDevice.nccl = True
Fake.abort = lambda self: print("aborted", flush=True)
mpidist.run_simulated(1, lambda comm: kept.append(NcclBackend(comm, Library(comm))))
"""


def test_aborted_at_the_end_of_the_process():
    """At which a process can start no thread."""
    done = processes.run([sys.executable, "-c", f"kept = []\n{AT_EXIT}"], 60, cwd=jobs.ROOT)
    assert done.status == 0 and done.output == "aborted\n"
