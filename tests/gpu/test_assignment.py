"""Which rank gets which GPU, and who is told that two share one."""

import logging
import socket
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import mpidist
from mpidist.device import find
from mpidist.device.find import find_device
from mpidist.errors import Unsupported
from mpidist.gpu.assignment import VisibleGpus, choose, use_gpu
from tests import gpu_here

A, B, C, D = GPUS = ("uuid-a", "uuid-b", "uuid-c", "uuid-d")


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [
        ([VisibleGpus("x", GPUS)] * 4, [0, 1, 2, 3]),
        ([VisibleGpus("x", GPUS[:2])] * 5, [0, 1, 0, 1, 0]),
        ([VisibleGpus("x", GPUS[:2]), VisibleGpus("y", GPUS[:2])] * 2, [0, 0, 1, 1]),
        ([VisibleGpus("x", (gpu,)) for gpu in GPUS], [0, 0, 0, 0]),  # Slurm gave each its own
        ([VisibleGpus("x", (A, B)), VisibleGpus("x", (B, C)), VisibleGpus("x", (C, A))], [0, 0, 0]),
        ([VisibleGpus("x", (B, A)), VisibleGpus("x", (B, C))], [0, 1]),
        ([VisibleGpus("x", GPUS[:2]), VisibleGpus("x", GPUS[:2], taken=0)], [1, 0]),
        ([VisibleGpus("x", (A,))] * 2, [0, 0]),
    ],
)
def test_choice(ranks, numbers):
    assert choose(ranks) == numbers


@pytest.fixture
def on_node(emulated_device, monkeypatch):
    """Runs a function on ranks of one host, each with an environment of its own."""
    local = threading.local()

    class Selected:
        """Ranks are threads here, and have what is a process's otherwise."""

        def __bool__(self):
            return hasattr(local, "number")

        def __getitem__(self, index):
            return local.number

        def __setitem__(self, index, numbers):
            (local.number,) = numbers

    monkeypatch.setattr(find, "_selected", Selected())
    monkeypatch.setattr(emulated_device, "count", 4)
    monkeypatch.setattr(emulated_device, "shown", lambda: getattr(local, "shown", None))

    def run(shown, function):
        def on_rank(comm):
            local.shown = shown[comm.rank]
            return function(comm)

        return mpidist.run_simulated(len(shown), on_rank)

    return run


@pytest.mark.parametrize(
    ("shown", "uuids"),
    [
        ([None] * 3, ["emulated-0", "emulated-1", "emulated-2"]),
        (["2,3", "2,3"], ["emulated-2", "emulated-3"]),
        (["3", "1"], ["emulated-3", "emulated-1"]),
        (["3,9,1"] * 2, ["emulated-3"] * 2),  # as for CUDA, a number too high ends the list
    ],
)
def test_ranks_get_gpus_of_their_own(on_node, caplog, shown, uuids):
    """By local rank; CUDA_VISIBLE_DEVICES is honoured, the same for all or one for each."""

    def on_rank(comm):
        number = comm.use_gpu()
        assert comm.use_gpu() == number == find_device().number  # it stays
        assert (comm.allreduce(find_device().array(np.ones(2))).get() == comm.size).all()
        return find_device().identity()

    with caplog.at_level(logging.WARNING, "mpidist"):
        assert on_node(shown, on_rank) == uuids
    assert not caplog.records


def test_sharing_by_accident_is_told(on_node, caplog):
    def on_rank(comm):
        comm.allreduce(find_device().array(np.ones(2)))

    with caplog.at_level(logging.WARNING, "mpidist"):
        on_node([None, None], on_rank)
        (record,) = caplog.records
        said = record.getMessage()
        assert said.startswith(f"ranks 0, 1 are all on GPU emulated-0 of {socket.gethostname()}")
        assert "emulated-1 there has no rank" in said and "comm.use_gpu()" in said
        caplog.clear()
        on_node(["2", "2"], on_rank)  # there is no other
        assert not caplog.records


@pytest.mark.parametrize("none", ["", "4", "GPU-f00"])
def test_a_rank_that_is_shown_no_gpu(on_node, none):
    """Every rank is told of it, and no other one goes on alone."""

    def on_rank(comm):
        with pytest.raises(
            Unsupported, match=f"rank {comm.rank}: use_gpu: rank 1 has no GPU: .*shows"
        ):
            comm.use_gpu()
        return True

    assert on_node(["0", none], on_rank) == [True, True]


def test_the_device_of_a_new_thread(emulated_device, monkeypatch):
    """PyTorch's backward runs in one: chosen, else PyTorch's, else that of the first thread."""
    cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(find, "_selected", [3])
    monkeypatch.setattr(find, "_first", [1])
    assert find.number_here() == 3
    find.install_device(None)
    assert find.number_here() == 3
    find._selected.clear()
    assert find.number_here() == 2
    find.install_device(emulated_device)
    assert find.number_here() is None
    find.install_device(None)
    cuda.current_device = lambda: 0
    assert find.number_here() == 1
    cuda.is_initialized = lambda: False
    find._first.clear()
    assert find.number_here() is None


def test_make_asks_the_driver(monkeypatch):
    """What `make test-gpu` says before it installs anything."""
    assert "no GPU here: there is no CUDA driver" in gpu_here.main(12, "libnone.so.1")
    found = {"cuDeviceGetCount": 2, "cuDriverGetVersion": 12090}

    class Driver:
        def __init__(self, name):
            self.cuInit = lambda flags: 0
            self.cuDeviceGetCount = lambda at: self.give(at, "cuDeviceGetCount")
            self.cuDriverGetVersion = lambda at: self.give(at, "cuDriverGetVersion")

        def give(self, at, name):
            at._obj.value = found[name]
            return 0

    monkeypatch.setattr(gpu_here.ctypes, "CDLL", Driver)
    assert gpu_here.main(12) is None
    assert "make test-gpu CUDA=12" in gpu_here.main(13)
    found["cuDeviceGetCount"] = 0
    assert "no GPU here: the CUDA driver shows none" in gpu_here.main(12)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(find, "why_no_device", lambda: "there is no CUDA device: none")
    with pytest.raises(Unsupported, match="rank 3: use_gpu: rank 0 has no GPU: there is no CUDA"):
        use_gpu(3, lambda mine: [mine])
