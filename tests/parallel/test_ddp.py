"""DDP: training is that of one process, and what it refuses."""

import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.errors import InvalidArgument, InvalidRank
from mpidist.nn import SGD, CrossEntropy, Linear, Module, Parameter, ReLU, Sequential
from mpidist.parallel import DDP, ZeroOptimizer
from mpidist.parallel.hooks import Compress
from mpidist.schedule import algorithms
from mpidist.topology import Grid
from tests.support.training_kits import (
    KITS,
    MANUAL,
    SMALL,
    Weights,
    assert_close,
    assert_identical,
    batch,
    fingerprint,
    train,
    train_alone,
)

ALLREDUCES = [a.name for a in algorithms("allreduce") if not a.local]


class OneWeight(Module):
    """The module of the original's tests."""

    def __init__(self, values):
        self.weight = Parameter(np.array(values, np.float32))

    def forward(self, x):
        return x

    def backward(self, grad):
        return grad


def test_ddp_sync_gradients():
    def rank_main(comm):
        ddp = DDP(OneWeight([1, 2, 3]), comm)
        ddp.module.weight.grad = np.full(3, comm.rank, np.float32)
        ddp.sync_gradients()
        return ddp.module.weight.grad.tolist()

    assert run_simulated(4, rank_main) == [[1.5, 1.5, 1.5]] * 4


def test_ddp_broadcast_parameters():
    def rank_main(comm):
        ddp = DDP(OneWeight([10, 20, 30] if comm.rank == 0 else [0, 0, 0]), comm)
        ddp.broadcast_parameters(0)
        return ddp.module.weight.data.tolist()

    assert run_simulated(3, rank_main) == [[10, 20, 30]] * 3


def mlp(seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    layers = Linear(6, 8, seed=random, dtype=dtype), Linear(8, 3, seed=random, dtype=dtype)
    return Sequential(layers[0], ReLU(), layers[1])


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_sync_gradients_gives_the_mean(comm):
    for method in ("sync_gradients", "overlapped_sync_gradients"):
        shapes = [(3,), (), (2, 5), (0,), (1, 7, 1)]
        dtypes = [np.float32, np.float64, np.float32, np.float32, np.float64]
        module = Weights(*map(np.zeros, shapes, dtypes))
        ddp = DDP(module, comm, bucket_bytes=40, first_bucket_bytes=8)
        for number, p in enumerate(module.weights, 1):
            p.grad = np.full_like(p.data, number * (comm.rank + 1))
        getattr(ddp, method)()
        for number, p in enumerate(module.weights, 1):
            assert p.grad.shape == p.data.shape and p.grad.dtype == p.data.dtype
            np.testing.assert_allclose(p.grad, number * (comm.size + 1) / 2, rtol=1e-6)


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_sync_gradients_missing_count_as_zero(comm):
    module = Weights(np.ones(4), np.ones(3))
    ddp = DDP(module, comm)
    if comm.rank == comm.size - 1:
        module.weights[0].grad = np.full(4, float(comm.size))
    ddp.sync_gradients()
    np.testing.assert_allclose(module.weights[0].grad, 1.0)
    assert module.weights[1].grad is None  # on all ranks
    ddp = DDP(Weights(np.ones(3)), comm, unused="zero")
    ddp.sync_gradients()
    np.testing.assert_array_equal(ddp.parameters()[0].grad, np.zeros(3))


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_sync_gradients_without_callbacks_are_kept(comm):
    """Of a library that does not report additions: nobody knows whether zeros were added."""
    weights = [SimpleNamespace(data=np.ones(2), grad=None) for _ in range(2)]
    ddp = DDP(SimpleNamespace(parameters=lambda: weights), comm)
    for _ in range(3):
        ddp.reducer.prepare()
        if weights[0].grad is None:
            weights[0].grad = np.zeros(2)
        weights[0].grad += comm.rank
        ddp.sync_gradients()
        np.testing.assert_allclose(weights[0].grad, (comm.size - 1) / 2)
        assert weights[1].grad is None if comm.size == 1 else not weights[1].grad.any()
        ddp.zero_grad()
    weights[0].grad = np.full(2, 1.0)
    ddp.sync_gradients()
    np.testing.assert_allclose(weights[0].grad, 1.0)
    assert weights[1].grad is None


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_sync_gradients_added_by_hand_are_kept(comm):
    """A layer may add to the zeroed view of a bucket without telling the parameter."""
    module = Weights(np.ones(2), np.ones(2))
    ddp = DDP(module, comm)
    for _ in range(3):
        ddp.reducer.prepare()
        p = module.weights[0]
        if p.grad is None:
            p.grad = np.zeros(2)
        if comm.rank == 0:
            p.grad += comm.size
        ddp.sync_gradients()
        np.testing.assert_allclose(p.grad, 1.0)
        assert module.weights[1].grad is None
        ddp.zero_grad()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_broadcast_parameters_is_in_place(comm):
    for root in range(comm.size):
        net = mlp(seed=comm.rank)
        before = [(p, p.data) for p in net.parameters()]
        optimizer = SGD(net.parameters())
        ddp = DDP(net, comm, init_sync=False)
        ddp.broadcast_parameters(root)
        for (p, data), q, expected in zip(
            before, net.parameters(), mlp(seed=root).parameters(), strict=True
        ):
            assert p is q and p.data is data
            np.testing.assert_array_equal(data, expected.data)
        assert optimizer.parameters == net.parameters()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_broadcast_parameters_leaves_gradients(comm):
    module = Weights(np.ones(3))
    ddp = DDP(module, comm)
    module.weights[0].grad = np.full(3, 2.0)
    ddp.sync_gradients()
    ddp.broadcast_parameters()
    np.testing.assert_array_equal(module.weights[0].grad, 2.0)


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.mpi(min_size=2)
def test_ddp_unlike_modules_are_refused_everywhere(comm):
    odd = comm.rank == comm.size - 1
    for unlike, said in (
        (np.zeros(4), rf"rank {comm.size - 1} has.*\(4,\).*rank 0 has.*\(3,\)"),
        (np.zeros(3, np.float32), "float32.*rank 0 has.*float64"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            DDP(Weights(unlike if odd else np.zeros(3)), comm)
    with pytest.raises(InvalidArgument, match=rf"rank {comm.size - 1} has .*rank 0 has nothing"):
        DDP(Weights(*[np.zeros(3)] * (2 if odd else 1)), comm)
    assert float(comm.allreduce(1.0)) == comm.size  # the communicator is still good


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_broadcast_parameters_wrong_root_is_refused(comm):
    with pytest.raises(InvalidRank, match=f"rank {comm.rank}: root={comm.size}"):
        DDP(Weights(np.zeros(3)), comm).broadcast_parameters(comm.size)


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_ddp_without_parameters_does_nothing(comm):
    ddp = DDP(Weights(), comm)
    ddp.broadcast_parameters()
    ddp.sync_gradients()
    ddp.overlapped_sync_gradients()
    assert ddp.parameters() == [] and ddp.buckets == ()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_ddp_training_is_that_of_one_process(comm):
    """The mean is over the whole batch, though parts differ in size and some are empty."""
    random = np.random.default_rng(3)
    x, labels = random.normal(size=(11, 6)), random.integers(0, 3, 11)
    ddp, alone = DDP(mlp(), comm, 200, 100), mlp()
    steps = [(0, 11), (11 - comm.size, 11), (4, 5)]
    optimizers = SGD(ddp.parameters(), 0.1, 0.9), SGD(alone.parameters(), 0.1, 0.9)
    loss = CrossEntropy("sum")
    for first, last in steps:
        mine = slice(first + comm.rank, last, comm.size)
        loss(ddp(x[mine]), labels[mine])
        ddp.zero_grad()
        ddp.backward(loss.backward(comm.size / (last - first)))
        ddp.overlapped_sync_gradients()
        loss(alone(x[first:last]), labels[first:last])
        alone.zero_grad()
        alone.backward(loss.backward(1 / (last - first)))
        for p, q in zip(ddp.parameters(), alone.parameters(), strict=True):
            np.testing.assert_allclose(p.grad, q.grad, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_ddp_algorithm_is_passed_on(comm):
    module = Weights(np.zeros(5))
    for name in ("ring", "tree:3", "linear"):
        module.weights[0].grad = np.full(5, float(comm.rank))
        DDP(module, comm, algorithm=name).sync_gradients()
        np.testing.assert_allclose(module.weights[0].grad, (comm.size - 1) / 2)
    with pytest.raises(InvalidArgument, match="'rung'"):
        DDP(module, comm, algorithm="rung").sync_gradients()


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.mpi(min_size=2)
def test_overlapped_sync_gradients_has_all_buckets_in_flight(comm):
    """No bucket can be done before the other ranks have begun, yet rank 0 starts them all."""
    module = Weights(*np.ones((3, 4)))
    watched = Watched(comm)
    ddp = DDP(module, watched, bucket_bytes=32, first_bucket_bytes=32, overlap="none")
    for p in module.weights:
        p.grad = np.full(4, float(comm.rank))
    if comm.rank == 0:
        watched.after_start = lambda: comm.send(np.ones(1), 1, tag=9)
        watched.wanted = len(ddp.buckets)
    elif comm.rank == 1:
        comm.recv(np.empty(1), 0, tag=9)
    ddp.overlapped_sync_gradients()
    assert ddp.in_flight_high_water == 3
    if comm.rank == 0:
        assert watched.open_together == 3
    for p in module.weights:
        np.testing.assert_allclose(p.grad, (comm.size - 1) / 2)


class Watched:
    """A communicator that counts the allreduces that are begun and not done."""

    def __init__(self, comm):
        self.comm = comm
        self.works, self.open_together = [], 0
        self.wanted, self.after_start = None, None

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def iallreduce(self, *args, **options):
        work = self.comm.iallreduce(*args, **options)
        self.works.append(work)
        self.open_together = max(self.open_together, sum(not w.test() for w in self.works))
        if len(self.works) == self.wanted:
            self.after_start()
        return work


@pytest.mark.parametrize("argument", ["bucket_bytes", "first_bucket_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_bucket_sizes(argument, value):
    def rank_main(comm):
        with pytest.raises(InvalidArgument, match=f"rank 0: {argument}={value}: .*>= 1"):
            DDP(OneWeight([1]), comm, **{argument: value})

    run_simulated(1, rank_main)


def test_shared_parameters_are_synced_once():
    def rank_main(comm):
        module = Weights(np.ones(2), np.ones(3))
        module.weights.append(module.weights[0])
        ddp = DDP(module, comm)
        assert [name for name, _ in ddp.named_parameters()] == ["0", "1"]
        module.weights[0].grad = np.ones(2)
        ddp.sync_gradients()
        np.testing.assert_array_equal(module.weights[0].grad, 1.0)

    run_simulated(2, rank_main)


def test_sync_gradients_calls():
    """A gradient passes one frame in each of ddp, reducer, transport and the communicator.

    One small allreduce tells which parameters no rank has used.
    """

    def rank_main(comm):
        module = Weights(np.ones(2))
        ddp = DDP(module, comm, overlap="none")
        ways = []

        def watch(frame, event, _):
            if event == "call" and frame.f_code.co_name == "allreduce":
                names = []
                while names[-1:] != ["sync_gradients"]:
                    names.append(frame.f_code.co_name)
                    frame = frame.f_back
                ways.append(names[::-1])

        for step in range(5):
            module.weights[0].grad = np.full(2, comm.rank + 1.0)
            sys.setprofile(watch if step == 4 else None)
            ddp.sync_gradients()
            sys.setprofile(None)
        flags = ["sync_gradients", "sync", "_take_back_unused", "allreduce"]
        assert ways == [["sync_gradients", "sync", "send", "allreduce"], flags]

    run_simulated(2, rank_main)


def equals_one_process(comm, kit, optimizer_name, overlap="none", passes=1, **options):
    net = kit.mlp(comm.rank)  # the wrapper gives all the weights of rank 0
    model = DDP(net, comm, overlap=overlap, **{**SMALL, **options})
    make, settings = kit.optimizers()[optimizer_name]
    train(comm, kit, model, make(net.parameters(), **settings), passes=passes)
    assert_close(kit, net, train_alone(kit, 0, optimizer_name))
    return model


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "optimizer_name, overlap, passes, options",
    [
        ("sgd", "none", 1, {"algorithm": "rabenseifner"}),
        ("momentum", "polls", 2, {}),
        ("momentum", "thread", 1, {"algorithm": "ring"}),
        ("adam", "thread", 1, {}),
        ("adam", "polls", 3, {"algorithm": "tree:2"}),
    ],
)
@pytest.mark.parametrize("kit", KITS)
def test_training_equals_one_process(comm, kit, optimizer_name, overlap, passes, options):
    equals_one_process(comm, kit, optimizer_name, overlap, passes, **options)


def experts(step, rank):
    """The expert of a rank: in a third of the steps the same on all ranks; the last in one step."""
    return 2 if step == 1 else 0 if step % 3 == 0 else (step + rank) % 2


@pytest.mark.parametrize("zero", (False, True))
@pytest.mark.parametrize("overlap", ("none", "polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("optimizer_name", ("momentum", "adam"))
def test_mixture_of_experts_equals_one_process(comm, kit, optimizer_name, overlap, zero):
    """What no rank has used in a step is left alone by momentum, as in one process."""
    steps, (make, settings) = 9, kit.optimizers()[optimizer_name]
    net, alone = kit.mixture(comm.rank), kit.mixture(0)
    model = DDP(net, comm, overlap=overlap, **SMALL)
    optimizer = (
        ZeroOptimizer(make, model, **settings) if zero else make(net.parameters(), **settings)
    )
    reference = make(alone.parameters(), **settings)
    for step in range(steps):
        x, labels = batch(step)
        for rank in range(comm.size):
            alone.chosen, part = experts(step, rank), slice(rank, None, comm.size)
            kit.step(alone, x[part], labels[part], 1 / len(x))
        reference.step()
        net.chosen, part = experts(step, comm.rank), slice(comm.rank, None, comm.size)
        with model.no_sync():
            kit.step(model, x[part][:2], labels[part][:2], comm.size / len(x))
        kit.step(model, x[part][2:], labels[part][2:], comm.size / len(x))
        model.sync_gradients()
        found = [grad is None for grad in kit.gradients(net)]
        assert found == [grad is None for grad in kit.gradients(alone)]
        optimizer.step()
        assert_identical(comm, kit, net)
        assert_close(kit, net, alone)
        reference.zero_grad()
        optimizer.zero_grad()


def loop(comm, kit, overlap, when, to_none, explicit):
    """Train without, or with, calls of sync_gradients(); zero_grad() at a place of the loop."""
    net = kit.mlp(comm.rank)
    model = DDP(net, comm, overlap=overlap, **SMALL)
    make, settings = kit.optimizers()["adam"]
    optimizer = make(net.parameters(), **settings)
    for step in range(8):
        x, labels = batch(step)
        part = slice(comm.rank, None, comm.size)
        if when == "begin":
            model.zero_grad(to_none)
        elif when == "between":
            model(kit.inputs(x[part]))
            model.zero_grad(to_none)
        kit.step(model, x[part], labels[part], comm.size / len(x))
        for _ in range(explicit):
            model.sync_gradients()
        optimizer.step()
        if when == "end":
            model.zero_grad(to_none)
    assert_identical(comm, kit, net)  # ranks that once differ stay apart
    assert model.stats().steps == 8
    return net


@pytest.mark.parametrize("overlap", ("auto", "none", "polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_backward_averages_as_sync_gradients_does(comm, kit, overlap):
    """The same bits with no, one or two calls of sync_gradients() in a step; close to one process.

    That one adds the gradients of a batch in another order.  zero_grad() at each place of the loop,
    because it takes away, or fills, what backward adds to.
    """
    alone = train_alone(kit, 0, "adam", steps=8)
    for when in ("begin", "between", "end"):
        for to_none in (True, False):
            nets = [loop(comm, kit, overlap, when, to_none, explicit) for explicit in (0, 1, 2)]
            assert_close(kit, nets[0], alone)
            assert len({fingerprint(kit, net) for net in nets}) == 1


@pytest.mark.parametrize("overlap", ("auto", "none", "polls", "thread"))
@pytest.mark.parametrize("kit", KITS)
def test_backward_passes_add_up(comm, kit, overlap):
    """Several in a step, each averaged by itself, or all but the last within no_sync()."""
    x, labels = batch()
    part, scale = slice(comm.rank, None, comm.size), comm.size / len(x)
    alone = kit.mlp(0)
    for _ in range(3):
        kit.step(alone, x, labels, 1 / len(x))
    for held_back in (0, 2):
        net = kit.mlp(comm.rank)
        model = DDP(net, comm, overlap=overlap, **SMALL)
        for _ in range(4):
            model.zero_grad()
            for number in range(3):
                with model.no_sync() if number < held_back else nullcontext():
                    kit.step(model, x[part], labels[part], scale)
            for mine, whole in zip(kit.gradients(net), kit.gradients(alone), strict=True):
                np.testing.assert_allclose(mine, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kit", KITS)
def test_forward_without_backward_leaves_parameters(comm, kit):
    """A model that is only evaluated in a step has no gradient: zeros would move its momentum."""
    nets = [kit.mlp(1), kit.mlp(2)]
    trained, evaluated = (DDP(net, comm, overlap="none", **SMALL) for net in nets)
    make, settings = kit.optimizers()["adam"]
    both = make([*nets[0].parameters(), *nets[1].parameters()], **settings)
    x, labels = batch()
    for step in range(4):
        before = fingerprint(kit, nets[1])
        if step % 2:  # a target, and a validation between backward and step()
            evaluated(kit.inputs(x))
        else:
            kit.step(evaluated, x, labels, 1.0)
        kit.step(trained, x, labels, 1.0)
        evaluated(kit.inputs(x))
        both.step()
        assert (fingerprint(kit, nets[1]) == before) == bool(step % 2)
        assert all((grad is None) == bool(step % 2) for grad in kit.gradients(nets[1]))
        both.zero_grad()


@pytest.mark.parametrize("kit", KITS)
def test_step_with_unaveraged_gradients_is_refused(comm, kit):
    net, other = kit.mlp(), kit.mlp()
    model = DDP(net, comm, overlap="none", **MANUAL)
    make, settings = kit.optimizers()["sgd"]
    optimizer, stranger = (make(x.parameters(), **settings) for x in (net, other))
    x, labels = batch()
    said = f"rank {comm.rank}: step.* gradients of 0.weight and 5 more were not averaged"
    for _ in range(2):
        kit.step(model, x, labels, comm.rank + 1.0)
        before = fingerprint(kit, net)
        with pytest.raises(InvalidArgument, match=said):
            optimizer.step()
        assert fingerprint(kit, net) == before
        stranger.step()  # has none of these gradients
        model.sync_gradients()
        optimizer.step()
        assert_identical(comm, kit, net)
        kit.step(model, x, labels, comm.rank + 1.0)
        optimizer.zero_grad()  # the step is given up
        optimizer.step()
    model.sync_gradients()
    model.zero_grad()
    with model.no_sync():
        kit.step(model, x, labels, 1.0)
        optimizer.step()  # training of this rank alone
    with pytest.raises(InvalidArgument, match=said):
        optimizer.step()
    model.close()
    optimizer.step()
    model = DDP(net, comm, **MANUAL)
    zero = ZeroOptimizer(make, model, **settings)
    kit.step(model, x, labels, 1.0)
    with pytest.raises(InvalidArgument, match=said):
        zero.step()
    model.sync_gradients()
    zero.step()


@pytest.mark.parametrize("kit", KITS)
def test_closed_ddp_leaves_the_module_alone(comm, kit):
    net = kit.mlp()
    model = DDP(net, comm, overlap="polls", **SMALL)
    x, labels = batch()
    for _ in range(2):
        kit.step(model, x, labels, 1.0)
        model.sync_gradients()
        model.zero_grad()
    model.close()
    for _ in range(2):  # twice without a sync: nobody minds
        kit.step(net, x, labels, comm.rank + 1.0)
    gradients = [np.array(g) for g in kit.gradients(net)]
    alone = kit.mlp()
    kit.step(alone, x, labels, 2 * (comm.rank + 1.0))
    for mine, reference in zip(gradients, kit.gradients(alone), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-12, atol=1e-12)
    assert float(comm.allreduce(1.0)) == comm.size


@pytest.mark.parametrize("kit", KITS)
def test_ddp_on_a_grid_averages_over_replicas(comm, kit):
    """Each stage of a pipeline averages over its own replicas."""
    for pipe in (p for p in range(1, comm.size + 1) if comm.size % p == 0):
        grid = Grid(comm, pipe=pipe)
        net = kit.mlp(comm.rank)
        model = DDP(net, grid.data, **SMALL)
        make, settings = kit.optimizers()["sgd"]
        train(grid.data, kit, model, make(net.parameters(), **settings), steps=3)
        reference = train_alone(kit, grid.pipe_index * grid.shape[0], "sgd", steps=3)
        assert_close(kit, net, reference)


@pytest.mark.parametrize("kit", KITS)
def test_ddp_wrong_options_are_refused(comm, kit):
    for option, value in (
        ("overlap", "sometimes"),
        ("buffers", "mine"),
        ("unused", "maybe"),
        ("sync", "soon"),
        ("algorithm", "rung"),
        ("bucket_bytes", 0),
        ("init_sync", "no"),
        ("check_replicas", -1),
        ("check_replicas", 1.5),
        ("check_replicas", True),
        ("differing", "heal"),
        ("differing", None),
        ("differing", "majority"),  # without comparisons
    ):
        with pytest.raises(InvalidArgument, match=rf"\b{option}[ =]{re.escape(repr(value))}"):
            DDP(kit.mlp(), comm, **{option: value})


@pytest.mark.parametrize("kit", KITS)
def test_ddp_wrong_modules_hooks_and_states_are_refused(comm, kit):
    net = kit.mlp()
    first = DDP(net, comm)
    for module, said in ((first, "DDP"), (list(net.parameters()), "list")):
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: module .*\b{said}\b"):
            DDP(module, comm)
    first.close()
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: hook='float16': "):
        DDP(net, comm, hook="float16")
    with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: hook=Compress\b.*Compress\("):
        DDP(net, comm, hook=Compress)
    for strange in (None, SimpleNamespace(rank=0, size=1)):  # as one of mpi4py
        with pytest.raises(InvalidArgument, match=rf"^comm={re.escape(repr(strange))}: "):
            DDP(net, strange)
    model = DDP(net, comm)
    net.note = 1
    with pytest.raises(AttributeError, match="'DDP' object has no attribute 'note', .*module.note"):
        _ = model.note
    with pytest.raises(AttributeError, match="'DDP' object has no attribute 'nota'$"):
        _ = model.nota
    with pytest.raises(
        InvalidArgument,
        match=rf"rank {comm.rank}: join.* optimizer .*\bint\b.*\bstep\b.*\bzero_grad\b",
    ):
        with model.join(3):
            pass
    for state in (3, {"module": net.state_dict(), "sending": {}}):
        with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: state "):
            model.load_state_dict(state)


@pytest.mark.parametrize("algorithm", ALLREDUCES)
def test_replicas_are_identical_with_every_algorithm(algorithm):
    """Bit by bit and at every step, though ranks add up in different places."""

    def rank_main(comm):
        kit = KITS[0].values[0]
        net = kit.mlp(comm.rank)
        model = DDP(net, comm, algorithm=algorithm, **SMALL)
        make, options = kit.optimizers()["adam"]
        train(comm, kit, model, make(net.parameters(), **options), steps=5)
        assert_close(kit, net, train_alone(kit, 0, "adam", steps=5))

    run_simulated(5, rank_main)
