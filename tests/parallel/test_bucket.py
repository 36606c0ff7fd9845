"""Buckets: gradients are views of them, and are copied only if they are not."""

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.errors import InvalidArgument
from mpidist.parallel import DDP
from tests.support.training_kits import KITS, MANUAL, SMALL, Weights, batch


@pytest.mark.parametrize("kit", KITS)
def test_gradients_in_buckets_are_not_copied(comm, kit):
    """Though gradients are forgotten in every step, as zero_grad() of PyTorch does."""
    net = kit.mlp()
    model = DDP(net, comm, overlap="none", **SMALL)
    make, settings = kit.optimizers()["sgd"]
    optimizer = make(net.parameters(), **settings)
    x, labels = batch()
    for _ in range(4):
        kit.step(model, x, labels, 1.0)
        model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
    assert model.stats().copies == 0
    if comm.size > 1:  # a gradient that does not lie in its bucket is copied, and counted
        for p in net.parameters():
            p.grad = p.data * 0
        model.sync_gradients()
        assert model.stats().copies == len(list(net.parameters()))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_replaced_gradient_of_a_sent_bucket_is_refused(comm, kit):
    model = DDP(kit.mlp(), comm, overlap="polls", **MANUAL)
    x, labels = batch()
    for step in range(2):
        model.zero_grad()
        kit.step(model, x, labels, 1.0)
        name, p = model.reducer.grouping.named[0]
        if step:  # the first step is observed only
            p.grad = None
            said = f"rank {comm.rank}: .* gradient of {name} .*overlap='none'"
            with pytest.raises(InvalidArgument, match=said):
                model.sync_gradients()
        else:
            model.sync_gradients()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_buckets_are_kept_across_steps(comm):
    module = Weights(np.ones(4), np.ones((2, 3)))
    ddp = DDP(module, comm, bucket_bytes=50, first_bucket_bytes=50)
    seen = []
    for step in range(3):
        for p in module.weights:
            p.grad = np.full_like(p.data, step + comm.rank)
        ddp.overlapped_sync_gradients()
        for p in module.weights:
            np.testing.assert_allclose(p.grad, step + (comm.size - 1) / 2)
        seen.append([id(bucket.flat) for bucket in ddp.buckets])
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 2
    # A backward that adds to what is there works in the buffer itself.
    for p in module.weights:
        p.grad += 1.0
    ddp.sync_gradients()
    np.testing.assert_allclose(module.weights[1].grad, 3 + (comm.size - 1) / 2)
    ddp.zero_grad(set_to_none=False)
    ddp.sync_gradients()
    np.testing.assert_array_equal(module.weights[1].grad, 0.0)
    ddp.zero_grad()
    ddp.sync_gradients()
    assert module.weights[1].grad is None


def test_gradient_of_another_shape_is_refused():
    def rank_main(comm):
        ddp = DDP(Weights(np.ones(2, np.float32)), comm)
        ddp.module.weights[0].grad = np.zeros(3, np.float32)
        with pytest.raises(InvalidArgument, match=r"rank 0: .* 0 has shape \(3,\).*\(2,\)"):
            ddp.sync_gradients()

    run_simulated(1, rank_main)
