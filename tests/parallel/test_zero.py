"""ZeRO: each rank keeps its part of the optimizer state."""

from functools import partial

import numpy as np
import pytest

from mpidist.errors import InvalidArgument, Unsupported
from mpidist.nn import SGD
from mpidist.parallel import DDP, ZeroOptimizer
from mpidist.parallel.hooks import TopK
from tests.support.training_kits import KITS, SMALL, assert_close, batch, torch, train, train_alone


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize(
    "optimizer_name, overlap",
    [
        ("sgd", "none"),
        ("momentum", "none"),
        ("adam", "none"),
        ("adam", "polls"),
        ("adam", "thread"),
    ],
)
def test_zero_equals_one_process(comm, kit, optimizer_name, overlap):
    net = kit.mlp(comm.rank)
    model = DDP(net, comm, overlap=overlap, **SMALL)
    make, options = kit.optimizers()[optimizer_name]
    optimizer = ZeroOptimizer(make, model, **options)
    train(comm, kit, model, optimizer, steps=20)
    assert_close(kit, net, train_alone(kit, 0, optimizer_name, steps=20))
    kept = sum(
        value.size if hasattr(value, "size") and not callable(value.size) else value.numel()
        for piece in optimizer.pieces
        for value in model.framework.optimizer_state(optimizer.optimizer, piece.flat).values()
        if hasattr(value, "shape") and value.shape
    )
    whole = (
        sum(v.size for v in kit.values(net)) * {"sgd": 0, "momentum": 1, "adam": 2}[optimizer_name]
    )
    assert kept <= whole / comm.size + 2 * len(model.buckets)  # a p-th, and what does not divide
    assert int(comm.allreduce(kept)) == whole


@pytest.mark.parametrize("kit", KITS)
def test_zero_clip_gradients_is_by_the_norm_of_all(comm, kit):
    net, alone = kit.mlp(), kit.mlp()
    model = DDP(net, comm, **SMALL)
    make, options = kit.optimizers()["sgd"]
    optimizer = ZeroOptimizer(make, model, **options)
    reference = make(alone.parameters(), **options)
    x, labels = batch()
    kit.step(model, x[comm.rank :: comm.size], labels[comm.rank :: comm.size], comm.size)
    model.sync_gradients()
    kit.step(alone, x, labels, 1.0)
    norm = np.sqrt(sum((g**2).sum() for g in kit.gradients(alone)))
    for g in kit.gradients(alone):
        g *= 0.5 / norm
    assert optimizer.clip_gradients(0.5) == pytest.approx(norm, rel=1e-12)
    optimizer.step()
    reference.step()
    assert_close(kit, net, alone)
    optimizer.zero_grad(set_to_none=False)
    assert not any(g.any() for g in kit.gradients(net))
    optimizer.zero_grad()
    assert all(g is None for g in kit.gradients(net))


@pytest.mark.parametrize("kit", KITS)
def test_zero_after_a_step_or_with_a_hook_is_refused(comm, kit):
    model = DDP(kit.mlp(), comm, **SMALL)
    make, options = kit.optimizers()["sgd"]
    x, labels = batch()
    kit.step(model, x, labels, 1.0)
    model.sync_gradients()
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}.* 1 step\\b"):
        ZeroOptimizer(make, model, **options)
    with pytest.raises(Unsupported, match=f"rank {comm.rank}: .*hook"):
        ZeroOptimizer(make, DDP(kit.mlp(), comm, hook=TopK()), **options)


@pytest.mark.parametrize("kit", KITS)
def test_zero_wrong_arguments_and_uses_are_refused(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, **SMALL)
    make, options = kit.optimizers()["sgd"]
    for arguments in ((make(net.parameters(), **options), model), (make, net)):
        with pytest.raises(
            InvalidArgument, match=f"(?s)optimizer=.*model of type {type(arguments[1]).__name__}: "
        ):
            ZeroOptimizer(*arguments)
    strangers = [{"params": list(kit.mlp().parameters())}]
    said = r"groups\[0\] .*\bparams\b" if kit.name == "torch" else "groups: .*None.*PyTorch"
    with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: {said}"):
        ZeroOptimizer(make, DDP(kit.mlp(), comm, **SMALL), strangers, **options)
    if kit.name == "torch":
        other, groups = kit.mlp(), []
        first = next(other.parameters())
        groups = [{"params": iter(other.parameters())}, {"params": [first]}]
        with pytest.raises(InvalidArgument, match=r"groups\[1\] .*\b0\.weight\b"):
            ZeroOptimizer(make, DDP(other, comm, **SMALL), groups, **options)
    ZeroOptimizer(make, model, **options)
    if comm.size > 1:
        with pytest.raises(InvalidArgument, match="clip_gradients.*ZeroOptimizer"):
            model.clip_gradients(1.0)
        with pytest.raises(InvalidArgument, match=r"join\(\).*ZeroOptimizer"), model.join():
            pass


@pytest.mark.parametrize("kit", KITS)
def test_zero_load_takes_over_algorithms_of_as_many_ranks(comm, kit):
    """Those of as many ranks are taken over, for the same bits; those of others may not serve."""
    model = DDP(kit.mlp(), comm, algorithm="ring", **SMALL)
    make, options = kit.optimizers()["sgd"]
    optimizer = ZeroOptimizer(make, model, **options)
    state = optimizer.state_dict()
    sending = state["sending"]
    ring = ["ring"] * len(model.buckets)
    assert sending["ranks"] == comm.size and sending["scatters"] == sending["gathers"] == ring
    direct = ["direct"] * len(ring)
    for ranks, expected in ((comm.size + 1, ring), (comm.size, direct)):
        now = {**sending, "ranks": ranks, "gathers": direct, "scatters": direct}
        optimizer.load_state_dict({**state, "state": {}, "sending": now})
        found = optimizer.state_dict()["sending"]
        assert found["gathers"] == found["scatters"] == expected and found["ranks"] == comm.size


class Halved(SGD):
    """An optimizer that mpidist does not know, and that updates each element by itself."""

    def _update(self, index, data, grad):
        super()._update(index, data, grad / 2)


@pytest.mark.parametrize("kit", KITS)
def test_zero_unknown_optimizer_is_refused(comm, kit):
    if kit.name == "torch":
        names = ("LBFGS", "Adafactor", "SparseAdam", "Muon")
        unknown = [getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)]
    else:
        unknown = [Halved]
    for optimizer in unknown:
        expected = rf"rank {comm.rank}: .*\b{optimizer.__name__}\b.*elementwise=True"
        with pytest.raises(Unsupported, match=expected):
            ZeroOptimizer(optimizer, DDP(kit.mlp(), comm, **SMALL))
    make, options = kit.optimizers()["adam"]
    ZeroOptimizer(partial(make, **options), DDP(kit.mlp(), comm, **SMALL))


def test_zero_unknown_optimizer_with_elementwise_trains(comm):
    kit = KITS[0].values[0]
    net, alone = kit.mlp(comm.rank), kit.mlp(0)
    model = DDP(net, comm, **SMALL)
    optimizer = ZeroOptimizer(Halved, model, elementwise=True, learning_rate=0.1)
    reference = SGD(alone.parameters(), learning_rate=0.05)
    train(comm, kit, model, optimizer, steps=5)
    for step in range(5):
        x, labels = batch(step)
        reference.zero_grad()
        kit.step(alone, x, labels, 1 / len(x))
        reference.step()
    assert_close(kit, net, alone)
