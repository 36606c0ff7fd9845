"""Collectives on a real GPU, by every executor: make test-gpu; skipped where there is none."""

import time

import ml_dtypes  # noqa: F401, so that numpy knows bfloat16
import numpy as np
import pytest

from mpidist import Communicator
from mpidist.bench.gpu import forced
from mpidist.device.find import find_device
from mpidist.device.recognise import as_device_array
from mpidist.errors import CommunicationError, InvalidArgument, Unsupported
from mpidist.gpu.nccl import calls
from mpidist.gpu.nccl.backend import NcclBackend, why_not_here
from tests.support import collectives as cases
from tests.support.gpu_kits import NEEDS_GPU, OnDevice, cupy, torch_for_gpu

pytestmark = NEEDS_GPU

MIB = 1 << 20
SIZES = (0, 4, 4096, MIB, 3 * MIB + 4, 64 * MIB, 256 * MIB)
DTYPES = ("int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64")
DTYPES += ("complex64", "complex128", "bool")


@pytest.fixture(autouse=True)
def number(comm):
    """Each rank has a GPU of its own, where there are as many: before the first array."""
    return comm.use_gpu()


@pytest.fixture(params=["nccl", "ipc", "mpi", "ipc_slots", "staged"])
def sub(request, comm, number):
    """A communicator whose arrays go to one executor; skipped where it cannot be."""
    with forced(comm, request.param) as made:
        try:
            x = made.empty(1, device="cuda") if request.param == "ipc" else cupy.ones(1)
            made.allreduce(x, out=x)
        except Unsupported as error:
            if request.param == "staged":  # it always can
                raise
            pytest.skip(f"this executor cannot be here: {error}")
        made.executor = request.param
        yield made


class OnGpu(OnDevice):
    """Arrays of cupy."""

    def __init__(self, comm, background=False):
        super().__init__(comm, background)
        self.device = cupy


@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_every_collective(comm, collective):
    for number, n in enumerate([*cases.lengths(comm.size), 3_000_017]):
        for in_place in (False, True):
            root = (number + in_place) % comm.size
            for background in (False, True):
                case = cases.CHECKS[collective]
                case(OnGpu(comm, background), "auto", n, "int64", root, in_place)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_size(sub, nbytes):
    """An allreduce in place, of float32, whose sums are whole numbers."""
    count = nbytes // 4
    x = (
        sub.empty(count, "float32", device="cuda")
        if sub.executor == "ipc"
        else cupy.empty(count, "f4")
    )
    x[...] = cupy.arange(count, dtype="i4") % 97 + sub.rank
    assert sub.allreduce(x, out=x) is x
    expected = cupy.arange(count, dtype="i4") % 97 * sub.size + sub.size * (sub.size - 1) // 2
    assert bool((x == expected.astype("f4")).all())
    if sub.executor == "ipc" and count:
        sub.free(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(sub, dtype):
    """Each operation that is defined; what an executor has no form of is staged."""
    for n in (1, sub.size + 1, 4099):
        host = np.random.default_rng([sub.rank, n]).integers(0, 3, n).astype(dtype)
        x = sub.empty(n, dtype, device="cuda") if sub.executor == "ipc" else cupy.empty(n, dtype)
        numbers = ("sum", "prod", "mean") if host.dtype.kind in "fc" else ("sum", "prod", "xor")
        for op in ("max", "or") if dtype == "bool" else numbers:
            x.set(host)
            assert sub.allreduce(x, op, out=x) is x
            assert np.array_equal(x.get(), sub.allreduce(host, op, algorithm="direct")), op
        x.set(host)
        sub.broadcast(x, sub.size - 1)
        assert np.array_equal(x.get(), sub.broadcast(host, sub.size - 1))
        if sub.executor == "ipc":
            sub.free(x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_the_bits_of_the_host(comm, dtype):
    """Kernels round as the host's do, and keep numbers that cupy's own kernels take for zero."""
    n, random = 40_000, np.random.default_rng([comm.rank, 1])
    host = random.normal(size=n).astype(dtype)
    if dtype == "float32":
        host[::2] = np.ldexp(np.float32(1.3), random.integers(-149, -100, n // 2))
    try:
        memory = comm.empty(host.nbytes, "u1", device="cuda")
    except Unsupported as error:
        pytest.skip(f"this executor cannot be here: {error}")
    bits = np.dtype("u2") if dtype == "bfloat16" else host.dtype  # cupy may lack bfloat16
    for op in ("sum", "mean", *(() if dtype == "complex64" else ("prod", "max", "min"))):
        expected = comm.allreduce(host, op, algorithm="staged")
        for x in (memory.view(bits), cupy.empty(n, bits)):
            x.set(host.view(bits))
            if dtype == "bfloat16":
                x = torch_for_gpu().as_tensor(x.view("i2")).view(torch_for_gpu().bfloat16)
            comm.allreduce(x, op, out=x)
            got = x.view(torch_for_gpu().int16).cpu().numpy() if dtype == "bfloat16" else x.get()
            assert got.tobytes() == expected.tobytes(), op
    comm.free(memory)


def test_on_a_stream_of_ones_own(comm):
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.zeros(5_000_000, "f4")
        x += comm.rank + 1
        comm.allreduce(x, out=x)
        x *= 2
        assert (x.get() == 2 * cases.total(comm.size)).all()


def test_communicators_leave_no_memory(comm):
    """Of the GPU, that is: memory of streams, of symmetric arrays, and of their barriers."""

    def free_bytes():
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.cuda.runtime.deviceSynchronize()
        comm.barrier()
        found = cupy.cuda.runtime.memGetInfo()[0]
        comm.barrier()  # no rank allocates while another one reads
        return found

    found = []
    for number in range(20):
        for executor in ("ipc", "staged"):
            with forced(comm, executor) as sub:
                try:
                    x = sub.empty(1000, device="cuda") if executor == "ipc" else cupy.empty(1000)
                except Unsupported as error:
                    pytest.skip(f"this executor cannot be here: {error}")
                x[...] = 1
                assert (sub.allreduce(x, out=x).get() == sub.size).all()
                assert (sub.iallreduce(x).wait().get() == sub.size**2).all()
                del x
        if number in (2, 19):
            found.append(free_bytes())
    assert abs(found[1] - found[0]) <= 4 * MIB, found


def test_what_is_refused(comm):
    x = cupy.zeros((4, 4))
    with pytest.raises(InvalidArgument, match="C-contiguous"):
        comm.allreduce(x[:, :2])
    with pytest.raises(InvalidArgument, match="host memory"):
        comm.allreduce(x, out=np.zeros((4, 4)))
    assert find_device().owns(as_device_array(x, 0).pointer)


CAPTURED = "rank {}: x is passed while its stream is being captured into a CUDA graph"


def test_a_captured_stream_is_refused(sub):
    """Before anything is queued; so is the default stream meanwhile.  Afterwards all goes on."""
    words, wanted = CAPTURED.format(sub.rank), cases.total(sub.size)
    x = sub.empty(1000, device="cuda") if sub.executor == "ipc" else cupy.empty(1000)
    x[...] = sub.rank + 1
    stream = cupy.cuda.Stream()
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        try:
            for call in (lambda: sub.allreduce(x, out=x), lambda: sub.iallreduce(x)):
                with pytest.raises(InvalidArgument, match=words):
                    call()
            with cupy.cuda.Stream.null, pytest.raises(InvalidArgument, match=words):
                sub.allreduce(x, out=x)
        finally:
            stream.end_capture()
        assert (sub.allreduce(x, out=x).get() == wanted).all()
    stream.synchronize()
    assert (sub.allreduce(x, "max", out=x).get() == wanted).all()


def test_a_graph_of_torch_is_refused(comm, number):
    torch = torch_for_gpu()
    torch.cuda.set_device(number)
    x = torch.full((1000,), comm.rank + 1.0, device="cuda")
    assert (comm.allreduce(x) == cases.total(comm.size)).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        for call in (lambda: comm.allreduce(y), lambda: comm.iallreduce(x, out=x)):
            with pytest.raises(InvalidArgument, match=CAPTURED.format(comm.rank)):
                call()
    graph.replay()
    assert (comm.allreduce(y) == 2 * cases.total(comm.size)).all()


def test_tensors_of_torch(comm, number):
    torch = torch_for_gpu()
    torch.cuda.set_device(number)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((1000,), comm.rank + 1.0, dtype=dtype, device="cuda")
        got = comm.allreduce(x)
        assert got.is_cuda and got.dtype == dtype
        assert (got.float().cpu() == cases.total(comm.size)).all()


def test_nccl_by_name(comm):
    """With a GPU for each rank all calls; with ranks on one GPU the refusal, before it starts."""
    if why_not_here():
        pytest.skip(f"this executor cannot be here: {why_not_here()}")
    try:
        backend = NcclBackend(comm)
    except Unsupported as error:
        assert comm.size > 1 and "are all on GPU" in str(error)
        return
    x = cupy.full(1000, comm.rank + 1.0)
    calls.nccl_allreduce(x, backend)
    backend.wait(0)
    assert (x.get() == cases.total(comm.size)).all()
    backend.close()


@pytest.mark.timeout(120)
def test_nccl_ends_where_a_rank_does_not_come(comm, monkeypatch):
    """Its kernel waits on the GPU for a rank that makes no call, and is ended at the deadline."""
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    monkeypatch.setenv("MPIDIST_GPU", "nccl")
    backend = comm.backend.split(0, comm.rank)
    sub = Communicator(backend, comm.config.replace(timeout=3.0))
    x = cupy.full(1000, comm.rank + 1.0)
    try:
        sub.allreduce(x, out=x)
    except Unsupported as error:
        sub.free()
        pytest.skip(f"this executor cannot be here: {error}")
    assert (x.get() == cases.total(comm.size)).all()
    began = time.monotonic()
    if comm.rank > 0:
        with pytest.raises(CommunicationError, match="NCCL has not finished allreduce.*deadline"):
            sub.allreduce(x, out=x)
            cupy.cuda.runtime.deviceSynchronize()  # which the end of the kernel lets go on
            while time.monotonic() < began + 20:
                sub.allreduce(x, out=x)
    comm.barrier()
    assert 2 < time.monotonic() - began < 20
    x[...] = 1  # the GPU goes on
    assert (comm.allreduce(x).get() == comm.size).all()
    if comm.rank == 0:
        with pytest.raises(CommunicationError, match="free .*within 3.0 s: rank 1 not arrived"):
            sub.free()
    assert sub.broken
