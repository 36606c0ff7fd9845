"""DDP, ZeRO and pipelines on a real GPU; the ranks may share it.  Skipped where there is none."""

import numpy as np
import pytest

from mpidist.parallel import DDP, ZeroOptimizer
from tests.support.gpu_kits import (
    NEEDS_GPU,
    compare_pipeline,
    compare_replicas,
    cupy,
    torch_for_gpu,
    train,
    train_alone,
)

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("how", ["ddp", "polls", "accumulate", "zero", "adam", "zero-adam"])
def test_replicas_of_cupy(comm, how):
    comm.use_gpu()
    got, ddp = train(comm, how, cupy.asarray)
    compare_replicas(comm, got)
    for mine, alone in zip(got, train_alone(comm.size, how), strict=True):
        np.testing.assert_allclose(mine, alone, rtol=1e-9, atol=1e-12)
    ddp.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_of_cupy(comm, schedule):
    if comm.size < 2:
        pytest.skip("needs at least 2 ranks")
    comm.use_gpu()
    compare_pipeline(comm, schedule, False, cupy.asarray)


def torch_net(torch):
    torch.manual_seed(1)
    sizes = (12, 64, 64, 5)
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (torch.nn.Linear(a, b), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers[:-1]).double().cuda()


@pytest.mark.parametrize("how", ["none", "polls", "zero"])
def test_torch_equals_one_process(comm, how):
    """A CUDA model on ranks that may share one GPU, and the same on all rows in one process."""
    torch = torch_for_gpu()
    torch.cuda.set_device(comm.use_gpu())
    model, alone = torch_net(torch), torch_net(torch)
    ddp = DDP(model, comm, 20_000, 5_000, overlap="none" if how == "zero" else how)
    if how == "zero":
        optimizer = ZeroOptimizer(torch.optim.Adam, ddp, lr=0.01)
    else:
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    other = torch.optim.Adam(alone.parameters(), lr=0.01)
    random = np.random.default_rng(0)
    for _ in range(6):
        x = torch.from_numpy(random.normal(size=(8 * comm.size, 12))).cuda()
        ddp(x[comm.rank :: comm.size]).square().mean().backward()
        alone(x).square().mean().backward()
        ddp.sync_gradients()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    for mine, there in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, there, rtol=1e-9, atol=1e-11)
    compare_replicas(comm, [p.detach().cpu().numpy() for p in model.parameters()])
    ddp.close()
