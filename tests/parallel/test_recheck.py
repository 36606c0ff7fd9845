"""Gradients that another rank computes again."""

import re
import socket

import numpy as np
import pytest

from mpidist.errors import InvalidArgument, ReplicasDiffer
from mpidist.parallel import DDP
from tests.support.training_kits import KITS, SMALL, batch, fingerprint, needs_torch, torch

HOST = socket.gethostname()


def of_kit(kit, wrong=()):
    """A `compute` of a kit's module, which computes one gradient wrongly if `wrong`."""

    def compute(module, batch):
        kit.step(module, *batch, 0.1)
        for index in wrong:
            gradient = kit.gradients(module)[index]
            gradient.flat[3] = np.nextafter(gradient.flat[3], np.inf)

    return compute


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kit", KITS)
def test_recheck_of_sound_ranks_changes_nothing(comm, kit):
    ends = []
    for every in (1, 1000):
        net = kit.mlp()
        model = DDP(net, comm, **SMALL)
        make, options = kit.optimizers()["adam"]
        optimizer = make(net.parameters(), **options)
        for number in range(4):
            x, labels = batch(number)
            mine = x[comm.rank :: comm.size], labels[comm.rank :: comm.size]
            optimizer.zero_grad()
            for place in range(2):  # before a step, and between backward and the optimizer's
                if number % every == 0:
                    model.recheck(of_kit(kit), mine)
                if not place:
                    kit.step(model, *mine, 0.1)
                    model.sync_gradients()
            optimizer.step()
        ends.append(fingerprint(kit, net))
    assert ends[0] == ends[1]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_recheck_names_the_rank_that_computes_wrongly(comm, kit):
    model = DDP(kit.mlp(), comm, **SMALL)
    names = [name for name, _ in model.framework.parameters(model.module)]
    for odd in (0, comm.size - 1):
        x, labels = batch(comm.rank)
        compute = of_kit(kit, wrong=[0, 2] if comm.rank == odd else ())
        with pytest.raises(ReplicasDiffer) as caught:
            model.recheck(compute, (x, labels))
        text, before = str(caught.value), (odd - 1) % comm.size
        which = f"{names[0]}, {names[2]} of the batch of rank"
        assert f"{which} {odd}, there and on rank {before}" in text
        assert f"{which} {(odd + 1) % comm.size}, there and on rank {odd}" in text
        if comm.size > 2:
            assert text.endswith(
                f"rank {odd} is in both pairs: it computes wrongly; rank {odd} runs on {HOST}"
            )
        else:
            assert text.endswith(f"; rank 0 runs on {HOST}, rank 1 runs on {HOST}")
    model.recheck(of_kit(kit), batch(comm.rank))  # it is still usable


@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("kit", KITS)
def test_recheck_of_what_is_random_accuses_no_rank(comm, kit):
    random = np.random.default_rng(comm.rank)

    def compute(module, batch):
        kit.step(module, *batch, random.random())

    with pytest.raises(ReplicasDiffer, match="compute does not always compute alike"):
        DDP(kit.mlp(), comm, **SMALL).recheck(compute, batch())


@pytest.mark.parametrize("kit", KITS)
def test_recheck_refuses_what_it_cannot_check(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, **SMALL)
    where = f"rank {comm.rank}: "
    with pytest.raises(InvalidArgument, match=f"{where}compute=3: expected a function"):
        model.recheck(3, batch())
    with pytest.raises(InvalidArgument, match=f"{where}compute=.* has left no gradients"):
        model.recheck(lambda module, batch: None, batch())

    def failing(module, batch):
        if comm.rank == comm.size - 1:
            raise ValueError("no such batch")
        of_kit(kit)(module, batch)

    expected = ValueError if comm.rank == comm.size - 1 else InvalidArgument
    with pytest.raises(expected, match="no such batch"):
        model.recheck(failing, batch())
    with pytest.raises(InvalidArgument, match="pickle"):
        model.recheck(lambda module, _: of_kit(kit)(module, batch()), lambda: None)
    if comm.size > 1:
        kit.values(net)[0][...] += comm.rank
        name = re.escape(model.reducer.grouping.named[0][0])
        with pytest.raises(ReplicasDiffer, match=f"{where}recheck.*: parameters differ .*{name}"):
            model.recheck(of_kit(kit), batch())


@needs_torch
def test_recheck_leaves_buffers_and_gradients_alone(comm):
    """Of a module with running means and a sparse gradient, whose compute seeds what is random."""
    net = torch.nn.Sequential(
        torch.nn.Embedding(5, 4, sparse=True),
        torch.nn.BatchNorm1d(4),
        torch.nn.Linear(4, 1),
    )
    model = DDP(net, comm, unused="zero")
    before = {name: x.clone() for name, x in net.state_dict().items()}

    def compute(module, batch):
        generator = torch.Generator().manual_seed(7)
        keep = torch.rand(len(batch), 4, generator=generator) > 0.5
        hidden = module[1](module[0](batch))
        module[2](hidden * keep).sum().backward()

    model.recheck(compute, torch.arange(5) % (comm.rank + 2))
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
