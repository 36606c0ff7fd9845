"""Compiled modules of PyTorch: its compiler is not for the threads of simulated ranks."""

import copy

import pytest

from mpidist.parallel import DDP
from tests.support.training_kits import NEEDS_TORCH, SMALLEST, torch

if torch is None:
    pytest.skip(NEEDS_TORCH, allow_module_level=True)

from torch import nn


@pytest.mark.long
@pytest.mark.parametrize("way", ("wrapper", "module", "inside"))
def test_compiled_module_is_averaged(comm, way):
    """Whether the wrapper is compiled, its module, or the module before it is wrapped."""
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    alone = copy.deepcopy(net)
    if way == "inside":
        net = torch.compile(net, backend="aot_eager")
    model = run = DDP(net, comm, **SMALLEST)
    if way != "inside":
        run = torch.compile(model if way == "wrapper" else net, backend="aot_eager")
    every = [torch.full((2, 3), r + 1.0) for r in range(comm.size)]
    with torch.no_grad():
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            q.copy_(p)
    (sum(alone(x).sum() for x in every) / comm.size).backward()
    for step in range(3):
        model.zero_grad()
        run(every[comm.rank]).sum().backward()
        assert model.stats().steps == step + 1
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-5)
