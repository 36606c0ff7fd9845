"""Buffers of a module, and what differs between replicas."""

from contextlib import nullcontext

import pytest

from mpidist.errors import InvalidArgument, ReplicasDiffer
from mpidist.parallel import DDP, ZeroOptimizer
from tests.support.training_kits import KITS, SMALL, assert_identical, batch, needs_torch, torch


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_check_replicas_names_parameters_and_ranks(comm, kit):
    """One rank skips a step: the next comparison says which parameters differ, and where."""
    last, (x, labels) = comm.size - 1, batch()
    make, options = kit.optimizers()["sgd"]
    for every, zero, overlap in ((1, False, "polls"), (3, False, "none"), (2, True, "none")):
        net = kit.mlp()
        model = DDP(net, comm, check_replicas=every, overlap=overlap, **SMALL)
        optimizer = (
            ZeroOptimizer(make, model, **options) if zero else make(net.parameters(), **options)
        )
        names = [name for name, _ in model.reducer.grouping.named]

        def step(number, model=model, net=net, optimizer=optimizer, zero=zero):
            optimizer.zero_grad()
            kit.step(model, x, labels, 1.0)
            model.sync_gradients()
            if zero:  # its step is collective: something else has gone wrong on that rank
                optimizer.step()
            if zero and number == 1 and comm.rank == last:
                model.framework.values(model.reducer.grouping.named[2][1])[...] += 1
            elif not zero and (number != 1 or comm.rank != last):
                optimizer.step()

        raised = None
        for number in range(1, 2 * every + 2):
            try:
                step(number)
            except ReplicasDiffer as error:
                assert raised is None and number == every + (every == 1)
                raised = str(error)
                assert f"rank {comm.rank}: sync_gradients() number {number}" in raised
                wrong = names[2:3] if zero else names[:5]
                assert all(f"{name} on rank {last}" in raised for name in wrong)
                assert zero or f"and {len(names) - 5} more" in raised
                model.broadcast_parameters()
                optimizer.zero_grad()
        assert raised
        assert_identical(comm, kit, net)


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


@needs_torch
@pytest.mark.ranks(1, 2, 3)
def test_frozen_parameters_start_equal_and_are_compared(comm):
    """A replica is the whole model, also what of it is not learnt."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for p in net.parameters():
        torch.nn.init.constant_(p, comm.rank + 1.0)
    net[0].requires_grad_(False)
    model = DDP(net, comm, check_replicas=1, sync="manual")
    assert all((p == 1).all() for p in net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    model.sync_gradients()
    torch.nn.init.constant_(net[0].weight, comm.rank + 1.0)
    every = ", ".join(map(str, range(1, comm.size)))
    told = pytest.raises(ReplicasDiffer, match=f"0.weight on ranks? {every};")
    with nullcontext() if comm.size == 1 else told:
        model.sync_gradients()
