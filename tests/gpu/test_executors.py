"""What can be known of arrays on a GPU without one: recognition, executors, detection, chunks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.calls import prepare
from mpidist.calls.arrays import as_input
from mpidist.calls.call import Call
from mpidist.device import find
from mpidist.device.array import DeviceArray
from mpidist.device.find import find_device
from mpidist.device.recognise import as_device_array, is_on_device, make_like
from mpidist.errors import ConfigError, InvalidArgument, Unsupported, UnsupportedDtype
from mpidist.gpu.chunks import chunks, elements
from mpidist.gpu.cuda_aware import Awareness, MpiLibrary, detect
from mpidist.gpu.executors import CLASSES, NAMES, RankProperties, forced_executor, table
from tests.support import jobs
from tests.support.emulated import EmulatedDevice

YES, NO = Awareness("yes", "it says so"), Awareness("no", "it says not")


@pytest.fixture
def device(emulated_device):
    return find_device()


# -- what is recognised


def test_an_array_is_described_and_not_copied(device):
    x = device.array(np.arange(12.0, dtype="f4").reshape(3, 4))
    found = as_device_array(x, 0)
    assert is_on_device(x) and not is_on_device(np.ones(3)) and not is_on_device([1, 2])
    assert (found.shape, found.dtype, found.nbytes, found.strides) == ((3, 4), "f4", 48, (16, 4))
    assert device.owns(found.pointer) and found.owner is x and found.device is device
    part = as_device_array(x[1], 0)
    assert part.pointer == found.pointer + 16 and found.overlaps(part) and part.overlaps(found)
    assert not part.overlaps(as_device_array(x[2], 0))
    assert isinstance(make_like(found, (2,), np.dtype("i8")), DeviceArray)


def foreign(device, **changes):
    """An object of another library, which has the interface and nothing else."""
    memory = device.array(np.arange(4.0))
    told = {**memory.__cuda_array_interface__, **changes}
    return SimpleNamespace(__cuda_array_interface__=told, memory=memory)


def test_any_object_with_the_interface_is_taken(device):
    def sum_on(comm):
        here = find_device()
        x, out = foreign(here), foreign(here)
        assert comm.allreduce(x, out=out) is out
        return out.memory.get().tolist()

    assert mpidist.run_simulated(2, sum_on) == [[0.0, 2.0, 4.0, 6.0]] * 2


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"strides": (16,), "shape": (2,)}, InvalidArgument, r"x of shape \(2,\).*strides \(16,\)"),
        ({"data": (0, False)}, InvalidArgument, r"rank 0: x of shape \(4,\) has a null pointer"),
        ({"mask": object()}, InvalidArgument, "x has a mask"),
        ({"typestr": "|O"}, UnsupportedDtype, "x has dtype object"),
        ({"typestr": "<q99"}, UnsupportedDtype, "which numpy does not know"),
        ({"typestr": "<V2", "shape": (4,)}, UnsupportedDtype, "op='sum' is not defined for dtype"),
    ],
)
def test_what_is_refused(device, changes, error, words):
    def call(comm):
        with pytest.raises(error, match=words):
            comm.allreduce(foreign(find_device(), **changes))

    mpidist.run_simulated(1, call)


def test_a_host_pointer_is_refused(device):
    host = np.arange(4.0)

    def call(comm):
        lying = foreign(find_device(), data=host.__array_interface__["data"])
        with pytest.raises(InvalidArgument, match="not an address of the device emulated"):
            comm.allreduce(lying)

    mpidist.run_simulated(1, call)


def test_host_and_device_do_not_mix(device):
    def calls(comm):
        x, host = find_device().array(np.ones(4)), np.ones(4)
        for call in (
            lambda: comm.allreduce(x, out=host),
            lambda: comm.allgather(x[:2], out=host),
            lambda: comm.broadcast(x, 1, host),
        ):
            with pytest.raises(InvalidArgument, match="out is in host memory.*x on a GPU"):
                call()
        for call in (lambda: comm.allreduce(host, out=x), lambda: comm.alltoall(host, x)):
            with pytest.raises(InvalidArgument, match="out is a GPU array and the input is not"):
                call()
        with pytest.raises(InvalidArgument, match="out is on a GPU and x in host memory"):
            comm.broadcast(host, 1 - comm.rank, x)
        with pytest.raises(InvalidArgument, match="dtype float64, the result has float32"):
            comm.allreduce(find_device().array(np.ones(4, "f4")), out=x)
        with pytest.raises(InvalidArgument, match=r"shape \(4,\), the result has \(8,\)"):
            comm.allgather(x, out=x)
        with pytest.raises(InvalidArgument, match="overlaps x"):
            comm.allreduce(x[:3], out=x[1:])
        with pytest.raises(InvalidArgument, match="this call takes host memory only"):
            as_input(x, 0)

    mpidist.run_simulated(2, calls)


def test_no_device():
    stray = SimpleNamespace(__cuda_array_interface__={})
    reason = find.why_no_device()
    if reason is None:
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(Unsupported, match=r"rank 2: x is a GPU array \(types.SimpleNamespace\)"):
        as_device_array(stray, 2)


def test_bench_without_a_gpu():
    """It names what is needed, and what was found."""
    if find.why_no_device() is None:
        pytest.skip("needs a machine without a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "mpidist", "bench", "gpu"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode and "bench gpu needs cupy, and a GPU for each rank" in done.stderr
    assert find.why_no_device().partition("(")[0] in " ".join(done.stderr.split())


def test_explain_without_a_gpu():
    """It says what is missing, in a line."""
    if find.why_no_device() is None:
        pytest.skip("needs a machine without a GPU")
    command = [sys.executable, "-m", "mpidist", "explain", "allreduce", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and not done.stdout
    assert find.why_no_device() in " ".join(done.stderr.split())


def test_cupy_is_not_needed(tmp_path):
    """A cupy that cannot be imported harms nobody who has no array on a GPU."""
    (tmp_path / "cupy.py").write_text("raise ImportError('poisoned')")
    program = (
        "import sys, numpy, mpidist, mpidist.cli, mpidist.gpu.service, mpidist.device.find as f\n"
        "mpidist.run_simulated(2, lambda comm: comm.allreduce(numpy.ones(3)))\n"
        "assert 'cupy' not in sys.modules\n"
        "assert 'poisoned' in f.why_no_device(), f.why_no_device()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environ = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=200)


def test_tensors_of_torch():
    """On the host: the interface is read from what tensors on any device have."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from mpidist.device.tensors import interface_of, make_like

    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        x = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
        told = interface_of(x)
        assert told["typestr"].name == name and told["shape"] == (3, 4)
        assert told["data"] == (x.data_ptr(), False)
        assert told["strides"] == (4 * told["typestr"].itemsize, told["typestr"].itemsize)
        made = make_like(x)((5,), told["typestr"])
        assert made.dtype == dtype and made.shape == (5,)
    assert not is_on_device(torch.zeros(2))


def test_lazy_tensors(device, monkeypatch):
    """Lazy conjugates and negatives; and where PyTorch raises instead of having no address."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    x = torch.ones(3, dtype=torch.complex64)
    for lazy, words in ((x.conj(), "conj"), (x.conj().imag, "resolve_neg")):
        with pytest.raises(InvalidArgument, match=f"rank 1: out is a lazily .*{words}"):
            as_device_array(lazy, 1, "out")

    def raises(x):
        raise KeyError(x.dtype)  # as for bfloat16, before PyTorch 2.4

    monkeypatch.setattr(torch.Tensor, "__cuda_array_interface__", property(raises))
    assert not is_on_device(torch.zeros(2))


# -- the emulated device is as late as a GPU can be


def test_streams_are_lazy():
    device = EmulatedDevice()
    x, host = device.array(np.zeros(4)), np.ones(4)
    other, mark = device.new_stream(), device.event()
    pointer = x.__cuda_array_interface__["data"][0]
    device.copy(pointer, host.__array_interface__["data"][0], 32, other)
    mark.record(other)
    assert (x.get() == 0).all()  # the default stream waits for nothing
    mark.block(0)
    host[:] = 2  # too late for a copy that had been done, early enough for this one
    assert (x.get() == 2).all()


# -- chunks


@given(
    st.sampled_from(["allgather", "reduce_scatter", "alltoall", "allreduce"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 200),
    st.data(),
)
def test_chunks_cover_everything_once(collective, counts, nbytes, data):
    size, rank = len(counts), data.draw(st.integers(0, len(counts) - 1))
    brings = counts[rank] if collective == "allgather" else sum(counts)
    gets = counts[rank] if collective == "reduce_scatter" else sum(counts)
    x, out = np.empty(brings), np.empty(gets)
    each = () if collective == "allreduce" else tuple(counts)
    even = len(set(each)) <= 1
    call = Call(collective, rank, size, 0, x.dtype, x, out, None, each, each, even=even)
    seen_in, seen_out = np.zeros(brings, int), np.zeros(gets, int)
    for chunk in chunks(call, nbytes):
        for extents, seen in ((chunk.input_extents, seen_in), (chunk.output_extents, seen_out)):
            for start, stop in extents:
                seen[start:stop] += 1
        if collective == "allreduce":
            assert elements(chunk.input_extents) * 8 <= max(nbytes, 8)
        elif not call.uneven_alltoall:
            assert sum(chunk.counts) * 8 <= max(nbytes, 8 * size)
    assert (seen_in == 1).all() and (seen_out == 1).all()


# -- executors


def test_executors():
    """A table of who can, who is asked for, and what is taken."""
    cases = [
        ([YES, YES], "", {"allreduce": "staged", "broadcast": "mpi", "send": "mpi"}),
        ([YES, NO], "", {"allreduce": "staged", "broadcast": "staged", "send": "staged"}),
        ([YES, YES], "staged", {"allreduce": "staged", "broadcast": "staged"}),
        ([YES, YES], "mpi", {"allreduce": "staged", "alltoall": "mpi"}),
    ]
    for answers, forced, expected in cases:
        found = table([RankProperties(answer, forced, 1) for answer in answers])
        by_class = {c.operations: c.name for c in found if c.taken and c.name != "ipc"}
        served = {name: by_class[kind] for kind, names in CLASSES.items() for name in names}
        assert expected.items() <= served.items(), (forced, served)
        assert all(c.why for c in found) and {c.name for c in found} <= set(NAMES)
    for nodes, native, words in ((2, True, "on 2 nodes"), (1, False, "threads of one process")):
        with pytest.raises(Unsupported, match=f"MPIDIST_GPU=ipc: the ranks are {words}"):
            table([RankProperties(YES, "ipc", 1)], native, nodes)
    with pytest.raises(Unsupported, match="MPIDIST_GPU=ipc: there are 33 ranks; the maximum is 32"):
        table([RankProperties(YES, "ipc", 1)] * 33)
    for forced, symmetric in (("", True), ("ipc", True), ("mpi", False), ("staged", False)):
        found = table([RankProperties(YES, forced, 1)])
        assert symmetric == any(c.taken for c in found if c.name == "ipc"), forced
    unknown = Awareness("unknown", "no query")
    for answers, words in (
        ([YES, NO], r"it says not \(rank 1\)"),
        ([unknown], "not known.*no query"),
    ):
        with pytest.raises(Unsupported, match=f"MPIDIST_GPU=mpi: .*{words}"):
            table([RankProperties(answer, "mpi", 1) for answer in answers])
    with pytest.raises(ConfigError, match="MPIDIST_GPU='magic': expected one of"):
        forced_executor({"MPIDIST_GPU": "magic"})


# -- whether MPI takes GPU addresses


def library(vendor, version=(5, 0, 0), kinds="", **functions):
    return MpiLibrary(vendor, version, kinds, functions.get)


def says(value):
    def query(kind, answer):
        assert kind.value == 0
        answer._obj.value = value
        return 0

    return query


def never(*_):
    raise AssertionError("this query ends the process")


ASKED = [
    (library("Open MPI"), {"MPIDIST_GPU_AWARE": "1"}, "yes", "MPIDIST_GPU_AWARE=1"),
    (library("Open MPI", kinds="mpi,cuda"), {"MPIDIST_GPU_AWARE": "0"}, "no", "AWARE=0"),
    (library("Open MPI", kinds="mpi,system,cuda:device"), {}, "yes", "mpi_memory_alloc_kinds"),
    (library("Open MPI", MPIX_Query_cuda_support=lambda: 1), {}, "yes", "MPIX_Query_cuda_support"),
    (library("Open MPI", MPIX_Query_cuda_support=lambda: 0), {}, "no", "reports no CUDA support"),
    (library("MPICH", (4, 2), MPIX_GPU_query_support=says(1)), {}, "yes", "MPIX_GPU_query"),
    (library("MPICH", (3, 4), MPIX_Query_cuda_support=never), {}, "unknown", "safe to ask"),
    (library("Intel MPI", MPIX_GPU_query_support=never), {}, "no", "I_MPI_OFFLOAD=1"),
    (
        library("Intel MPI", MPIX_GPU_query_support=says(1)),
        {"I_MPI_OFFLOAD": "1"},
        "yes",
        "reports CUDA support",
    ),
    (library("Cray MPICH"), {}, "no", "MPICH_GPU_SUPPORT_ENABLED=1"),
    (library("Fujitsu MPI"), {}, "unknown", "no query for CUDA support; MPIDIST_GPU_AWARE=1"),
]


@pytest.mark.parametrize(("known", "environ", "answer", "words"), ASKED)
def test_detection(known, environ, answer, words):
    found = detect(known, environ)
    assert found.answer == answer and words in found.why


def test_detection_refuses_other_values():
    with pytest.raises(ConfigError, match="MPIDIST_GPU_AWARE='maybe': expected 0 or 1"):
        detect(library("Open MPI"), {"MPIDIST_GPU_AWARE": "maybe"})


ASK = """
import json, os, mpidist.gpu.cuda_aware as aware
library = aware.loaded_library()
found = aware.detect(library, json.loads(os.environ.get("PRETENDED") or "{}"))
print(json.dumps([library.vendor, found.answer, found.why]))
"""


def ask(python, pretended="", **environ):
    """What detection says of the library that a Python loads, in a pretended environment."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environ}
    environ["PRETENDED"] = pretended
    done = subprocess.run(
        [python, "-c", ASK], env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@jobs.each_mpi
def test_detection_of_the_libraries_here(python):
    """Those of the package index are built without CUDA, and say so when asked."""
    vendor, answer, why = ask(python)
    query = {"Open MPI": "MPIX_Query_cuda_support", "MPICH": "MPIX_GPU_query_support"}[vendor]
    assert answer == "no" and query in why


def test_detection_of_intel_mpi():
    """Its library, where the package impi-rt is installed beside this Python."""
    path = Path(sys.prefix) / "lib/libmpi.so.12"
    if not path.exists():
        pytest.skip("needs Intel MPI: pip install impi-rt")
    environ = {"MPI4PY_LIBMPI": str(path), "I_MPI_FABRICS": "shm"}
    vendor, answer, why = ask(sys.executable, **environ)
    assert vendor == "Intel MPI" and answer == "no" and "only with I_MPI_OFFLOAD=1" in why
    # Started without it, for with it the library ends a process that finds no GPU.
    answer, why = ask(sys.executable, pretended='{"I_MPI_OFFLOAD": "1"}', **environ)[1:]
    assert answer == "no" and "MPIX_GPU_query_support" in why


def test_chunks_are_not_checked_again(device, monkeypatch):
    """The arguments are checked once, with the call; its chunks are made of that."""
    monkeypatch.setenv("MPIDIST_GPU_CHUNK_BYTES", "16")
    seen, check = [], prepare.as_input
    monkeypatch.setattr(prepare, "as_input", lambda *a, **k: (seen.append(a), check(*a, **k))[1])

    def on_rank(comm):
        x = find_device().array(np.arange(40.0))
        assert (comm.allreduce(x).get() == 2 * np.arange(40)).all()
        got = comm.iallgather(x[:7]).wait()
        assert got.get().tolist() == [*range(7)] * 2

    mpidist.run_simulated(2, on_rank)
    given = [x for x, *_ in seen if getattr(x, "dtype", None) == np.float64]
    assert len(given) == 2 * 2  # by each rank, for each call
