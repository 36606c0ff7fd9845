"""ZeRO and communication hooks on any communicator, with any library."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from mpidist.errors import InvalidArgument, Unsupported
from mpidist.nn import SGD
from mpidist.parallel import DDP, ZeroOptimizer
from mpidist.parallel.hooks import Compress, PowerSGD, TopK
from tests.support.training_cases import SMALL, assert_close, assert_identical, train, train_alone
from tests.support.training_kits import KITS, Weights, batch, torch


def zero_equals_one_process(comm, kit, optimizer_name, overlap="none"):
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


def zero_clips_by_the_norm_of_all(comm, kit):
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


def zero_is_made_before_the_first_step(comm, kit):
    model = DDP(kit.mlp(), comm, **SMALL)
    make, options = kit.optimizers()["sgd"]
    x, labels = batch()
    kit.step(model, x, labels, 1.0)
    model.sync_gradients()
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}.* 1 step\\b"):
        ZeroOptimizer(make, model, **options)
    with pytest.raises(Unsupported, match=f"rank {comm.rank}: .*hook"):
        ZeroOptimizer(make, DDP(kit.mlp(), comm, hook=TopK()), **options)


def what_zero_cannot_do_is_refused(comm, kit):
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


def algorithms_of_a_saved_run(comm, kit):
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


def unknown_optimizers_need_the_flag(comm, kit):
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


def an_unknown_optimizer_trains_with_the_flag(comm):
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


def hooked(comm, kit, hook, overlap="none", steps=40):
    """Train on one batch, and give the loss's gradient norm before and after."""
    net = kit.mlp()
    model = DDP(net, comm, hook=hook, overlap=overlap, **SMALL)
    make, options = kit.optimizers()["sgd"]
    optimizer = make(net.parameters(), **options)
    x, labels = batch()
    part = slice(comm.rank, None, comm.size)
    for _ in range(steps):
        optimizer.zero_grad()
        kit.step(model, x[part], labels[part], 4 * comm.size / len(x))
        model.sync_gradients()
        optimizer.step()
        assert_identical(comm, kit, net)
    return net


def error(kit, net):
    """How many of the samples are classified wrongly, and the mean of the losses."""
    x, labels = batch()
    values = kit.values(net)
    for k in range(0, len(values), 2):
        x = x @ values[k].T + values[k + 1]
        if k < len(values) - 2:
            x = np.maximum(x, 0)
    x -= x.max(axis=1, keepdims=True)
    return float((np.log(np.exp(x).sum(axis=1)) - x[np.arange(len(x)), labels]).mean())


HOOKS = {
    "float16": lambda: Compress("float16"),
    "bfloat16": lambda: Compress("bfloat16"),
    "top-k": lambda: TopK(0.2),
    "powersgd": lambda: PowerSGD(rank=2),
}


def hooks_train_nearly_as_well(comm, kit, name, overlap="none"):
    exact = error(kit, hooked(comm, kit, None))
    begin = error(kit, kit.mlp())
    found = error(kit, hooked(comm, kit, HOOKS[name](), overlap))
    if comm.size == 1:
        assert found == exact  # nothing is sent
    # Feedback brings back what was left out: most of what exact gradients reach is reached.
    assert found - exact < 0.25 * (begin - exact)
    assert found != exact or comm.size == 1


def steps_of_hooks_do_not_mix(comm):
    """Ranks come to poll at other times: second steps begin in the same order all the same."""
    module = Weights(*np.zeros((4, 6, 6)))
    model = DDP(module, comm, 288, 288, overlap="polls", hook=PowerSGD(rank=1))
    for step in range(8):
        model.zero_grad()
        model.reducer.prepare()
        for k, p in enumerate(reversed(module.weights)):
            if k == step % 4 and comm.size > 1:  # rank 0 is late, so others' first steps end later
                comm.barrier()
                if comm.rank == 0:
                    for _ in range(2000):
                        model.reducer.transport.poll()
            p.accumulate(np.full((6, 6), comm.rank + 1.0))
        model.sync_gradients()
        for p in module.weights:
            np.testing.assert_allclose(p.grad, (comm.size + 1) / 2, atol=1e-9)


def a_failing_hook_is_heard_of(comm, kit, overlap):
    def fails(bucket):
        raise ValueError(f"bucket {bucket.index}")

    model = DDP(kit.mlp(), comm, hook=fails, overlap=overlap, **SMALL)
    x, labels = batch()
    told = pytest.raises(ValueError, match="bucket 0") if comm.size > 1 else nullcontext()
    with told:  # one rank sends nothing
        kit.step(model, x, labels, 1.0)


def compression_is_what_it_says(comm):
    """The mean of rounded gradients, and the rest in the next step."""
    module = Weights(np.zeros(3, np.float32))
    ddp = DDP(module, comm, hook=Compress("float16"), overlap="none")
    value = np.float32(1 + 2**-12)  # the end of it is lost: float16 has 10 bits behind the point
    total = np.zeros(3, np.float32)
    for step in range(1, 5):
        module.weights[0].grad = np.full(3, value)
        ddp.sync_gradients()
        sent = module.weights[0].grad
        assert (sent == sent.astype(np.float16)).all()
        total += sent
        # Small messages are added up in float16, which rounds the sum of many ranks once more.
        lost = 0 if comm.size in (2, 4) else step * 2**-9
        assert abs(total[0] - step * value) <= 2**-10 + lost
    assert total[0] > 4  # in the course of four steps one more unit went


def nothing_is_lost_when_buckets_change(comm):
    """What the first step left out is made up for, though parameters are in other buckets then."""
    module = Weights(*np.zeros((3, 10)))
    ddp = DDP(module, comm, 160, 80, hook=TopK(0.2))
    before, sent = [bucket.names for bucket in ddp.buckets], np.zeros((3, 10))
    for step in range(1, 4):
        ddp.zero_grad()
        ddp.reducer.prepare()
        for k, p in enumerate(module.weights):  # not in the reverse order
            p.accumulate(np.arange(10.0) + k)
        ddp.sync_gradients()
        sent += [p.grad for p in module.weights]
        kept = ddp.reducer.hook.save(ddp.buckets)
        left = {
            name: state["residual"][start : start + 10]
            for bucket, state in zip(ddp.buckets, kept, strict=True)
            for name, start in zip(bucket.names, bucket.starts)
            if "residual" in state
        }
        for k in range(3 if comm.size > 1 else 0):
            total = comm.allreduce(left[str(k)], op="mean") + sent[k]
            np.testing.assert_allclose(total, step * (np.arange(10.0) + k))
    assert comm.size == 1 or [bucket.names for bucket in ddp.buckets] != before


def an_overflow_passes(comm):
    """What does not fit into float16 is lost, but does not come back in later steps."""
    module = Weights(np.zeros(3, np.float32))
    ddp = DDP(module, comm, hook=Compress("float16"), overlap="none")
    for value, expected in ((1e6, np.inf), (2.0, 2.0), (2.0, 2.0)):
        module.weights[0].grad = np.full(3, value, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            ddp.sync_gradients()
        assert (module.weights[0].grad == expected).all()


def a_step_without_numbers_passes(comm, hook):
    """What is not finite once is told, and does not come back in later steps."""
    module = Weights(np.zeros((8, 8), np.float32))
    ddp = DDP(module, comm, hook=hook, overlap="none")
    finite = []
    for value in (1.0, np.nan, 1.0, 1.0):
        module.weights[0].grad = np.full((8, 8), value, np.float32)
        ddp.sync_gradients()
        finite.append(bool(np.isfinite(module.weights[0].grad).all()))
    assert finite == [True, False, True, True]


def complex_numbers_are_not_made_real(comm):
    module = Weights(np.ones((4, 4), np.complex64))
    for hook in (Compress("float16"), PowerSGD(1)):
        ddp = DDP(module, comm, hook=hook, overlap="none")
        module.weights[0].grad = np.full((4, 4), 1 + 1j, np.complex64)
        if comm.size > 1:
            with pytest.raises(
                Unsupported, match=rf"rank {comm.rank}: hook=.*gradient of 0 .*complex64"
            ):
                ddp.sync_gradients()
        del ddp
    module.weights[0].grad = np.full((4, 4), 3 + 4j, np.complex64)
    assert DDP(module, comm).clip_gradients(10.0) == pytest.approx(20.0)


def wrong_hooks_are_refused(comm):
    for make, argument, value in (
        (Compress, "dtype", "float8"),
        (TopK, "share", 0),
        (TopK, "share", 1.5),
        (PowerSGD, "rank", 0),
        (PowerSGD, "rank", 1.5),
    ):
        with pytest.raises(InvalidArgument, match=rf"\b{argument}={value!r}: "):
            make(value)
