"""Hooks written for the DDP of PyTorch."""

import pytest

from mpidist.errors import InvalidArgument
from mpidist.parallel import DDP
from tests.support.training_kits import NEEDS_TORCH, SMALLEST, torch

if torch is None:
    pytest.skip(NEEDS_TORCH, allow_module_level=True)

from torch import nn

pytestmark = pytest.mark.ranks(1, 2, 3)


def test_hook_of_torch_is_called_with_each_bucket(comm):
    """With the attributes of GradBucket; its future's value is the gradient."""
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        mean = torch.from_numpy(comm.allreduce(bucket.buffer().numpy(), op="mean"))
        future = torch.futures.Future()
        future.set_result(state * mean)
        return future

    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)).to(torch.float32)
    for overlap in ("none", "polls"):
        model = DDP(net, comm, overlap=overlap, **SMALLEST)
        model.register_comm_hook(2.0, hook)
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: this DDP has a hook"):
            model.register_comm_hook(2.0, hook)
        count = len(model.buckets)
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            net[0](torch.full((1, 2), comm.rank + 1.0)).sum().backward()
            factor = 1 if comm.size == 1 else 2
            torch.testing.assert_close(
                net[0].weight.grad, torch.full((2, 2), factor * (comm.size + 1) / 2)
            )
            if comm.size > 1:
                assert [(i, last) for i, last, _ in seen] == [
                    (i, i == count - 1) for i in range(count)
                ]
        model.close()
    if comm.size > 1:
        model = DDP(net, comm)
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
        with pytest.raises(
            InvalidArgument, match=f"rank {comm.rank}: .*returned a Tensor: expected"
        ):
            model(torch.ones(1, 2)).sum().backward()
