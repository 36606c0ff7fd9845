"""Ranks with unequally many steps."""

from contextlib import nullcontext

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.parallel import DDP
from tests.support.training_kits import KITS, SMALL, Weights, assert_close, assert_identical, batch


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer_name", ("sgd", "momentum", "adam"))
def test_join_mean_is_over_the_ranks_that_have_steps(comm, kit, optimizer_name):
    """Rank r has r steps more than rank 0; the mean is over all ranks all the time."""
    net = kit.mlp(comm.rank)
    model = DDP(net, comm, **SMALL)
    make, settings = kit.optimizers()[optimizer_name]
    optimizer = make(net.parameters(), **settings)
    with model.join(optimizer) as joined:
        for step in range(2 + comm.rank):
            x, labels = batch(step)
            optimizer.zero_grad()
            kit.step(model, x[comm.rank :: comm.size], labels[comm.rank :: comm.size], 1.0)
            model.sync_gradients()
            optimizer.step()
    assert joined.first == ((0, 2) if comm.size > 1 else None)
    assert_identical(comm, kit, net)
    alone = kit.mlp(0)
    optimizer = make(alone.parameters(), **settings)
    for step in range(1 + comm.size):
        x, labels = batch(step)
        active = [r for r in range(comm.size) if step < 2 + r]
        mine = np.concatenate([np.arange(len(x))[r :: comm.size] for r in active])
        optimizer.zero_grad()
        kit.step(alone, x[mine], labels[mine], 1 / comm.size)
        optimizer.step()
    assert_close(kit, net, alone)


@pytest.mark.parametrize("kit", KITS)
def test_join_without_optimizer_ends_with_equal_parameters(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, **SMALL)
    make, settings = kit.optimizers()["sgd"]
    optimizer = make(net.parameters(), **settings)
    with model.join():
        for step in range(4 - 2 * (comm.rank % 2)):
            x, labels = batch(step)
            optimizer.zero_grad()
            kit.step(model, x, labels, 1.0)
            model.sync_gradients()
            optimizer.step()
    assert_identical(comm, kit, net)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_join_early_error_names_the_first_to_finish(comm, kit):
    model = DDP(kit.mlp(), comm, **SMALL)
    x, labels = batch()
    with pytest.raises(
        InvalidArgument, match=rf"rank {comm.rank}: rank 1 .*\b1 step\b.*early='error'"
    ):
        with model.join(early="error"):
            for _ in range(3 if comm.rank != 1 else 1):
                model.zero_grad()
                kit.step(model, x, labels, 1.0)
                model.sync_gradients()
    assert float(comm.allreduce(1.0)) == comm.size


@pytest.mark.parametrize("kit", KITS)
def test_join_clipping_outside_of_step_is_refused(comm, kit):
    """Clipping that a finished rank does not do is an error; as part of step() it is not."""

    class Clipped:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def step(self):
            self.model.clip_gradients(0.01)
            self.optimizer.step()

        def zero_grad(self):
            self.optimizer.zero_grad()

    for whole in (True, False):
        net = kit.mlp()
        model = DDP(net, comm, unused="error", **SMALL)
        make, settings = kit.optimizers()["sgd"]
        optimizer = Clipped(model, make(net.parameters(), **settings))
        given = optimizer if whole else optimizer.optimizer
        told = pytest.raises(
            InvalidArgument, match=rf"rank {comm.rank}: join\(\): .*rank 0: 0\.weight on rank"
        )
        with nullcontext() if whole or comm.size == 1 else told, model.join(given):
            for step in range(1 + comm.rank):
                x, labels = batch(step)
                kit.step(model, x, labels, 1.0)
                model.sync_gradients()
                optimizer.step()
                optimizer.zero_grad()
        if whole:
            assert_identical(comm, kit, net)


@pytest.mark.parametrize("kit", KITS)
def test_join_check_replicas_waits_for_the_end(comm, kit):
    """In join() without an optimizer the parameters of finished ranks stay behind, till its end."""
    make, options = kit.optimizers()["sgd"]
    for given in (True, False):
        net = kit.mlp()
        model = DDP(net, comm, check_replicas=1, **SMALL)
        optimizer = make(net.parameters(), **options)
        with model.join(optimizer if given else None):
            for step in range(1 + comm.rank):
                x, labels = batch(step)
                kit.step(model, x, labels, 1.0)
                model.sync_gradients()
                optimizer.step()
                optimizer.zero_grad()
        assert_identical(comm, kit, net)


class Noted(Weights):
    """With a buffer, which differs from rank to rank and from step to step."""

    def __init__(self, comm):
        super().__init__(np.zeros(3))
        self.comm, self.noted = comm, np.zeros(2)

    def named_buffers(self):
        return [("noted", self.noted)]

    def zero_grad(self, set_to_none=True):
        self.weights[0].grad = None

    def step(self):
        self.zero_grad()


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.mpi(min_size=2)
def test_join_buffers_come_from_the_lowest_unfinished_rank(comm):
    """They are those of the lowest rank that has not finished: a finished one has no new values."""
    module = Noted(comm)
    model = DDP(module, comm)
    with model.join(module) as joined:
        for step in range(1 + comm.rank):
            module.weights[0].grad = np.ones(3)
            module.noted[...] = 10 * comm.rank + step
            model.sync_gradients()
            assert (module.noted == 10 * step + step).all() and joined.root == step
            module.step()
    last = comm.size - 1
    assert (module.noted == 10 * last + last).all() and joined.first == (0, 1)
