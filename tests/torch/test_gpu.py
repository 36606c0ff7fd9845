"""Modules of PyTorch on the device: tensors of the host are taken for those of a GPU."""

import numpy as np
import pytest

import mpidist
from mpidist import Pipeline
from mpidist.device import find
from mpidist.errors import InvalidArgument
from mpidist.gpu.staged import HostStaged
from mpidist.parallel import DDP, ZeroOptimizer
from tests.support.emulated import EmulatedDevice, take_tensors_for_a_gpus
from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)


@pytest.fixture
def on_gpu(monkeypatch):
    """Takes every tensor for one of a GPU from here on; gives the names of what was staged."""
    staged = []

    def begin():
        take_tensors_for_a_gpus(monkeypatch)
        serve, start = HostStaged.serve, HostStaged.begin
        monkeypatch.setattr(
            HostStaged, "serve", lambda s, c, a: (staged.append(c.collective), serve(s, c, a))[1]
        )
        monkeypatch.setattr(
            HostStaged,
            "begin",
            lambda s, c, *a: (staged.append("i" + c.collective), start(s, c, *a))[1],
        )
        return staged

    yield begin
    find.install_device(None)


def filled(module, dtype):
    """Give a module weights that do not depend on which thread comes first."""
    random = np.random.default_rng(1)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.from_numpy(random.uniform(-0.5, 0.5, p.shape)))
    return module.to(dtype)


def net(dtype):
    linear, norm = torch.nn.Linear, torch.nn.BatchNorm1d(6)
    return filled(torch.nn.Sequential(linear(5, 6), norm, torch.nn.ReLU(), linear(6, 2)), dtype)


def train(comm, how, dtype):
    model = net(dtype)
    buffers = "average" if "zero" in how else "broadcast"
    ddp = DDP(model, comm, 100, 50, overlap="polls" if how == "polls" else "none", buffers=buffers)
    if "zero" in how:
        optimizer = ZeroOptimizer(torch.optim.Adam, ddp, lr=0.01)
    else:
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    for step in range(4):
        x = torch.from_numpy(np.random.default_rng([step, comm.rank]).normal(size=(4, 5)))
        ddp(x.to(dtype)).square().mean().backward()
        ddp.sync_gradients()
        (optimizer if "zero" in how else ddp).clip_gradients(0.1)
        optimizer.step()
        optimizer.zero_grad()
    ddp.close()
    return [x.float().numpy().copy() for x in model.state_dict().values()]


@pytest.mark.parametrize("how", ["ddp", "polls", "zero"])
def test_replicas(on_gpu, how):
    """The bits of the host."""
    dtype = torch.bfloat16 if how == "ddp" else torch.float32
    expected = mpidist.run_simulated(2, lambda comm: train(comm, how, dtype))
    staged = on_gpu()
    got = mpidist.run_simulated(2, lambda comm: train(comm, how, dtype))
    for mine, there in zip(got, expected):
        for a, b in zip(mine, there, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert all(np.array_equal(a, b) for a, b in zip(*got))
    used = {"ddp": "allreduce", "polls": "iallreduce", "zero": "reduce_scatter"}
    assert {used[how], "broadcast"} <= set(staged)


def test_a_captured_stream_is_refused(on_gpu):
    on_gpu()

    def refused(comm):
        x, device = torch.ones(3), find.find_device()
        with device.capture(device.current_stream()):
            with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: x is .* a CUDA graph"):
                comm.allreduce(x)
            with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: x is .* a CUDA graph"):
                comm.iallreduce(x, out=x)
        return comm.allreduce(x).tolist()

    assert mpidist.run_simulated(2, refused) == [[2.0] * 3] * 2


def stages(comm):
    every = [torch.nn.Linear(5, 6), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(6, 2))]
    pipe = Pipeline(filled(every[comm.rank], torch.bfloat16), comm, 2, "1f1b")
    x, target = torch.ones(4, 5).bfloat16(), torch.zeros(4, 2).bfloat16()
    loss = torch.nn.MSELoss()
    found = [pipe.step(*((x,) if comm.rank == 0 else (None, target, loss))) for _ in range(2)]
    pipe.close()
    return found, [p.grad.float().numpy().copy() for p in every[comm.rank].parameters()]


def test_stages(on_gpu, monkeypatch):
    expected = mpidist.run_simulated(2, stages)
    on_gpu()
    copied = []
    monkeypatch.setattr(
        EmulatedDevice,
        "copied",
        property(lambda self: 0, lambda self, nbytes: copied.append(nbytes)),
        raising=False,
    )
    got = mpidist.run_simulated(2, stages)
    for mine, there in zip(got, expected):
        assert mine[0] == there[0]
        assert all(np.array_equal(a, b) for a, b in zip(mine[1], there[1], strict=True))
    assert sum(copied) == 2 * 2 * 2 * (4 * 6 * 2)  # steps, ways, down and up; bytes of all rows
