"""Training with everything on an emulated device: DDP, ZeRO and pipelines stay on the device."""

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.device.find import find_device
from mpidist.errors import ReplicasDiffer, Unsupported
from mpidist.nn import Linear
from mpidist.parallel import DDP
from mpidist.parallel.hooks import Compress
from tests.support.gpu_kits import compare_pipeline, compare_replicas, net, train, train_alone


@pytest.fixture
def sub(request, comm, emulated_device, monkeypatch):
    """A communicator for arrays on a device, by the executor that the test names."""
    forced = getattr(request, "param", "ipc")
    monkeypatch.setenv("MPIDIST_GPU", "" if forced == "ipc" else forced)
    monkeypatch.setenv("MPIDIST_GPU_CHUNK_BYTES", "256")
    made = Communicator(comm.backend.split(0, comm.rank), comm.config)
    yield made
    made.free()


@pytest.mark.parametrize(
    ("sub", "how"),
    [
        ("ipc", "ddp"),
        ("ipc", "accumulate"),
        ("ipc", "zero-adam"),
        ("staged", "polls"),
        ("staged", "zero"),
        ("mpi", "adam"),
    ],
    indirect=["sub"],
)
def test_replicas_equal_one_process(sub, how):
    """Buckets, averages and slices on a device, on a stream of its own; the host reads nothing."""
    device = find_device()
    device.use(device.new_stream())
    try:
        got, ddp = train(sub, how)
        compare_replicas(sub, got)
        for mine, alone in zip(got, train_alone(sub.size, how), strict=True):
            np.testing.assert_allclose(mine, alone, rtol=1e-9, atol=1e-12)
        if sub.size > 1:
            in_place = any(c.taken for c in sub.gpu.candidates if c.name == "ipc")
            assert all(b.comm.gpu.holds(b.flat) == in_place for b in ddp.buckets)
        ddp.close()
    finally:
        device.use(0)


def test_gradients_of_several_streams(sub):
    """A bucket waits for every stream that its gradients came on, and so does who reads them."""
    if sub.size < 2:
        pytest.skip("needs at least 2 ranks")  # one rank sends nothing: its streams are its own
    device = find_device()
    net = Linear(3, 2, dtype=np.float64)
    for p in net.parameters():
        p.data = device.array(p.data)
    ddp, streams = DDP(net, sub), [0, device.new_stream(), device.new_stream()]
    for step in range(3):
        ddp.zero_grad()
        for p, stream in zip(net.parameters(), streams[1:]):
            device.use(stream)
            p.accumulate(device.array(np.zeros(p.data.shape)) + (sub.rank + step))
        device.use(0)
        ddp.sync_gradients()
        for p in net.parameters():
            assert (p.grad.get() == step + (sub.size - 1) / 2).all()


@pytest.mark.parametrize(
    ("sub", "schedule", "checkpoint"),
    [("staged", "1f1b", False), ("mpi", "gpipe", True), ("mpi", "zb-h1", False)],
    indirect=["sub"],
)
def test_stages_on_a_device(sub, schedule, checkpoint):
    """Activations and gradients go from device to device; the bits are those of the host."""
    if sub.size < 2:
        pytest.skip("needs at least 2 ranks")
    device = find_device()
    device.use(device.new_stream())
    try:
        compare_pipeline(sub, schedule, checkpoint)
    finally:
        device.use(0)


@pytest.mark.parametrize("differing", ["raise", "majority"])
def test_flipped_bit_is_found_where_the_parameters_are(sub, differing):
    """Their digests are computed on the device; a repair copies from there to there."""
    net = Linear(3, 2, dtype=np.float64, seed=1)
    for p in net.parameters():
        p.data = find_device().array(p.data)
    ddp = DDP(net, sub, check_replicas=1, differing=differing, sync="manual")
    right = net.weight.data.get()

    def step():
        for p in net.parameters():
            p.accumulate(find_device().array(np.zeros(p.data.shape)))
        ddp.sync_gradients()

    step()
    if sub.rank == sub.size - 1 and sub.size > 1:
        wrong = right.copy()
        wrong.view(np.uint64)[1, 2] ^= 1
        net.weight.data.set(wrong)
    if sub.size > 1 and (differing == "raise" or sub.size == 2):
        with pytest.raises(ReplicasDiffer, match=f"weight on rank {sub.size - 1}; "):
            step()
    else:
        step()
        assert net.weight.data.get().tobytes() == right.tobytes()
        assert ddp.repaired == (sub.size > 1)


def test_what_has_no_form_on_a_device(sub):
    net = Linear(3, 2)
    for p in net.parameters():
        p.data = find_device().array(p.data)
    with pytest.raises(Unsupported, match="hook=Compress computes on the host.*on a GPU"):
        DDP(net, sub, hook=Compress())
    with pytest.raises(Unsupported, match="overlap='thread': the gradients are on a GPU"):
        DDP(net, sub, overlap="thread")


def test_one_bucket_where_nothing_overlaps(comm, emulated_device, monkeypatch):
    """On a GPU without NCCL buckets are sent at the end; sizes that the user gives are kept."""
    monkeypatch.setenv("MPIDIST_GPU", "staged")
    sub = Communicator(comm.backend.split(0, comm.rank), comm.config)
    given = {"bucket_bytes": 300, "first_bucket_bytes": 100}
    for options, one in (({}, True), (given, False), ({"bucket_bytes": 300}, False)):
        ddp = DDP(net(find_device().array), sub, **options)
        assert (len(ddp.buckets) == 1) is one
        ddp.close()
    monkeypatch.setattr("mpidist.parallel.ddp.MIB", 100)
    ddp = DDP(net(find_device().array), sub, overlap="polls")
    assert len(ddp.buckets) > 1
    ddp.close()
    sub.free()
