"""Batch normalisation over all ranks."""

import copy
import pickle

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.parallel import DDP
from tests.support.training_kits import NEEDS_TORCH, torch

if torch is None:
    pytest.skip(NEEDS_TORCH, allow_module_level=True)

from torch import nn

from mpidist.torch import SyncBatchNorm

pytestmark = pytest.mark.ranks(1, 2, 3)


def test_sync_batch_norm_equals_one_process(comm):
    """The whole batch on one process gives the same outputs, gradients and running statistics."""
    counts = [2 + (3 * rank) % 4 if rank else 3 for rank in range(comm.size)]
    counts[-1] = 0 if comm.size > 2 else counts[-1]  # a rank without samples
    starts = np.cumsum([0, *counts])
    part = slice(starts[comm.rank], starts[comm.rank + 1])
    x = torch.randn(sum(counts), 3, 5, generator=torch.Generator().manual_seed(1)).double() + 100
    for momentum, affine in ((0.1, True), (None, False)):
        alone = nn.Sequential(
            nn.BatchNorm1d(3, momentum=momentum, affine=affine), nn.Tanh()
        ).double()
        weights = alone[0].weight
        net = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone), comm)
        assert isinstance(net[0], SyncBatchNorm)
        for module in (net, copy.deepcopy(net)):
            again = copy.deepcopy(alone)
            for _ in range(2):
                mine, whole = x[part].clone().requires_grad_(), x.clone().requires_grad_()
                out, reference = module(mine), again(whole)
                torch.testing.assert_close(out, reference[part], rtol=0, atol=1e-9)
                out.pow(3).sum().backward()
                reference.pow(3).sum().backward()
                torch.testing.assert_close(mine.grad, whole.grad[part], rtol=0, atol=1e-9)
                for p, q in zip(module.parameters(), again.parameters(), strict=True):
                    total = torch.from_numpy(comm.allreduce(p.grad.numpy()))
                    torch.testing.assert_close(total, q.grad, rtol=0, atol=1e-9)
                    p.grad = q.grad = None
            for mine, whole in zip(module.buffers(), again.buffers(), strict=True):
                torch.testing.assert_close(mine, whole, rtol=0, atol=1e-9)
            module.eval(), again.eval()
            torch.testing.assert_close(module(x), again(x), rtol=0, atol=1e-9)
            assert weights is None or module[0].weight.shape == weights.shape
    kept = pickle.loads(pickle.dumps(net)).train()
    with pytest.raises(InvalidArgument, match="set the attribute comm of the layer"):
        kept(x)
    with pytest.raises(InvalidArgument, match=r"input has shape \(2, 4\): expected \(n, 3, "):
        net.train()(torch.ones(2, 4))
    local = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    if not torch.distributed.is_initialized():
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*0 is a .*SyncBatchNorm.*"):
            DDP(local, comm)
    DDP(SyncBatchNorm.convert_sync_batchnorm(local, comm), comm).close()
