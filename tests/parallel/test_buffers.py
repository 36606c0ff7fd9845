"""Buffers of a module, which are equal on all ranks or each rank's own."""

import pytest

from mpidist.errors import InvalidArgument
from mpidist.parallel import DDP
from tests.support.training_kits import needs_torch, torch


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_buffers_are_broadcast_averaged_or_kept(comm):
    for how in ("broadcast", "average", "keep"):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        model = DDP(net, comm, buffers=how, sync="manual")
        running = net[1].running_mean
        model(torch.full((4, 2), float(comm.rank)) + torch.arange(4.0)[:, None]).sum().backward()
        mine = running.clone()
        model.sync_gradients()
        means = torch.from_numpy(comm.allgather(mine.numpy()[None]))
        expected = {"broadcast": means[0], "average": means.mean(0), "keep": mine}[how]
        torch.testing.assert_close(running, expected)
        assert net[1].running_mean is running and int(net[1].num_batches_tracked) == 1


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_replaced_buffers_are_synced(comm):
    class Smoothed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x):
            self.mean = 0.5 * self.mean + x.mean(0)  # not in place
            return self.layer(x)

    net = Smoothed()
    model = DDP(net, comm, sync="manual")
    for _ in range(2):
        model(torch.full((2, 2), comm.rank + 1.0)).sum().backward()
        model.sync_gradients()
    assert net.mean.tolist() == [1.5, 1.5]  # that of rank 0
    net.mean = torch.zeros(3)
    if comm.size > 1:
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: .*\bmean\b.*\(2,\).*\(3,\)"):
            model.sync_gradients()
