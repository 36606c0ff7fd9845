"""The parts of a pipeline's run, each by itself."""

import random
from functools import partial

import numpy as np
import pytest
from training_kits import NEEDS_TORCH, torch

import mpidist
from mpidist.errors import InvalidArgument, RankFailed, Unsupported
from mpidist.nn import Identity, Linear, Module, ReLU, Sequential
from mpidist.parallel.pipe.divided import Partition, divide
from mpidist.parallel.pipe.keeper import Keeper
from mpidist.parallel.pipe.microbatches import bounds, cut_gradients, shape_of
from mpidist.parallel.pipe.partition import partition
from mpidist.parallel.pipe.structure import flatten, select, unflatten

KINDS = [
    "plain",
    pytest.param("torch", marks=pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)),
]


def squares(y, t):
    return ((y - t) ** 2).sum(dim=1).mean()


def plain_squares(y, t):
    return float(((y - t) ** 2).sum(axis=1).mean()), 2 * (y - t) / len(y)


def test_the_remainder_goes_to_the_last():
    assert bounds(11, 4) == [(0, 2), (2, 4), (4, 6), (6, 11)]
    assert bounds(4, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_structures_come_back():
    a, b, c = np.ones(1), np.ones(2), np.ones(3)
    value = ({"a": a, "n": None, "list": [b, 3, "text"]}, c)
    tree, tensors = flatten(value)
    assert [t.size for t in tensors] == [1, 2, 3] and hash(tree)
    back = unflatten(tree, tensors)
    assert back[0]["a"] is a and back[0]["list"][1:] == [3, "text"] and back[1] is c
    assert unflatten(tree, tensors, plain=False)[0]["list"][1:] == [None, None]
    assert [x if x is None else x.size for x in select(tree, (None, c))] == [None, None, 3]
    for wrong, message in (
        ((a,), "grad is a tuple of 1: allowed is a tuple of 2, or None"),
        (({"a": a}, c), r"grad\[0\] is a dict of \['a'\]: allowed is a dict of \['a', 'n', 'list'"),
        (((a, None, b), c), r"grad\[0\] is a tuple of 3: allowed is a dict of"),
        (({"a": 3, "n": None, "list": None}, c), r"grad\[0\]\['a'\] is a int: allowed is a tenso"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            select(tree, wrong, "grad")


def test_gradients_are_made_like_the_outputs():
    outputs = [shape_of(np.ones((rows, 3))) for rows in (2, 2, 3)]
    whole = np.arange(21.0).reshape(7, 3)
    for given in (whole, [whole[:2], whole[2:4], whole[4:]]):
        found = cut_gradients(given, outputs, 1)
        assert np.array_equal(np.concatenate([part for (part,) in found]), whole)
    assert cut_gradients([None, whole[:2], None], outputs, 1)[0] == [None]
    for wrong, message in (
        (None, "grad=None: the outputs' gradients are needed here"),
        (np.ones((6, 3)), "grad has 6 rows: allowed are the 7 of the outputs"),
        ([whole], "grad has 1 entries: allowed is one for each of num_microbatches=3"),
        ([whole[:2]] * 3, r"grad of microbatch 2 has shape \(2, 3\): .* its output, \(3, 3\)"),
        ([whole[:2], 3, None], "grad of microbatch 1 is a int: allowed is a tensor or None"),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 1: {message}"):
            cut_gradients(wrong, outputs, 1)


def test_divide_is_best():
    """Against all ways to cut."""
    from itertools import combinations

    random = np.random.default_rng(0)
    for _ in range(30):
        costs = random.integers(0, 9, random.integers(1, 8)).tolist()
        parts = int(random.integers(1, len(costs) + 1))
        ends = divide(costs, parts)
        assert len(ends) == parts and ends == sorted(set(ends)) and ends[-1] == len(costs)
        found = max(sum(costs[a:b]) for a, b in zip([0, *ends], ends))
        ways = combinations(range(1, len(costs)), parts - 1)
        assert found == min(
            max(sum(costs[a:b]) for a, b in zip((0, *w), (*w, len(costs)))) for w in ways
        )


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_partition_loses_no_layer():
    """A layer may be called ``layers``."""
    from collections import OrderedDict

    made = {"layers": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)}
    parts = partition(torch.nn.Sequential(OrderedDict(made)), 2)
    assert [list(part) for part in parts] == [[made["layers"]], [made["head"]]]

    class Own(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x) + x

    for wrong in (made["head"], made, "text", [], Own(made["head"])):
        name = type(wrong).__name__
        with pytest.raises(InvalidArgument, match=f"model is a {name}: allowed are a Sequential"):
            partition(wrong, 1)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_partition_of_layers_that_work_in_place():
    """They are timed on memory of their own, and begin no stage, where autograd forbids them."""
    layers = [torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True)]
    example = -torch.ones(2, 4)
    for by in ("time", "parameters"):
        parts = partition(torch.nn.Sequential(*layers), 2, by=by, example=example)
        assert parts.layers == ((0, 1), (1, 3)) and bool((example == -1).all())
    with pytest.raises(InvalidArgument, match="stages=3: allowed are 1 … 2, the number of layers"):
        partition(layers, 3)


def test_partition_by_parameters(capsys, caplog):
    layers = [Linear(4, 4), ReLU(), Linear(4, 12), Linear(12, 4), ReLU(), Linear(4, 4)]
    with caplog.at_level("INFO", "mpidist"):
        parts = partition(Sequential(*layers), 3, verbose=False)
    assert not capsys.readouterr().out and str(parts) in caplog.text
    assert partition(layers, 3).costs == parts.costs
    assert capsys.readouterr().out == f"{parts}\n"
    mpidist.run_simulated(3, lambda comm: partition(layers, 3, comm=comm))
    assert capsys.readouterr().out == f"{parts}\n"  # rank 0 only
    assert [layer for part in parts for layer in part.layers] == layers
    assert parts.costs == (20, 60, 72) and parts.balance == pytest.approx(152 / 3 / 72)
    assert str(parts).startswith("stage 0: layer 0, 20 parameters\nstage 1: layers 1 … 2, 60")
    assert str(parts).endswith("balance 0.70 (mean / largest)")
    assert "8,400,000 parameters" in str(Partition([None], "parameters", [8.4e6], [(0, 1)]))
    model = Sequential(*layers)
    model.training = False
    assert not any(part.training for part in partition(model, 2, verbose=False))
    for wrong in (0, 7, True):
        with pytest.raises(InvalidArgument, match=r"stages=.*allowed are 1 … 6"):
            partition(layers, wrong)
    with pytest.raises(InvalidArgument, match="by='size'"):
        partition(layers, 2, by="size")
    with pytest.raises(InvalidArgument, match="verbose=1: allowed are True and False"):
        partition(layers, 2, verbose=1)
    with pytest.raises(InvalidArgument, match="needs example="):
        partition(layers, 2, by="time")


def test_partition_by_time():
    """The one long layer is not put together with the next longest."""

    class Long(Identity):
        def forward(self, x):
            for _ in range(200):
                x = x @ self.square
            return x

        square = np.eye(64)

    layers = [Linear(64, 64, dtype=np.float64), Long(), Identity(), Identity()]
    parts = partition(layers, 2, by="time", example=np.ones((8, 64)))
    assert parts.layers == ((0, 1), (1, 4)) and parts.costs[1] > parts.costs[0]
    assert layers[0].weight.grad is None


class Counting(Identity):
    """Counts and remembers, in every way; draws numbers, and changes its input."""

    def __init__(self):
        self.calls, self.means, self.total = 0, [], np.zeros(1)
        self.random = np.random.default_rng(0)

    def forward(self, x):
        self.calls += 1
        self.means.append(float(x.mean()))
        self.total += self.random.random() + np.random.random() + random.random()
        x *= 2
        return x


def test_measuring_leaves_no_trace():
    """Of layers, their gradients and states, the example, and the sources of random numbers."""
    layers, example = [Counting(), Linear(4, 4)], np.ones((2, 4), np.float32)
    layers[1].weight.grad = before = np.ones((4, 4), np.float32)
    sources = np.random.get_state()[1].tolist(), random.getstate(), layers[0].random
    state = sources[2].bit_generator.state
    partition(layers, 2, by="time", example=example, verbose=False)
    assert (layers[0].calls, layers[0].means, *layers[0].total) == (0, [], 0)
    assert layers[1].weight.grad is before and (before == 1).all() and (example == 1).all()
    assert (np.random.get_state()[1].tolist(), random.getstate()) == sources[:2]
    assert sources[2].bit_generator.state == state and layers[1]._input is None


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_measuring_leaves_no_trace_in_torch():
    net = torch.nn.Sequential(
        torch.nn.BatchNorm1d(4),
        torch.nn.Linear(4, 4),
        torch.nn.Dropout(),
        torch.nn.Linear(4, 4).requires_grad_(False),
        torch.nn.LazyLinear(2),
    )
    net[1].weight.grad = before = torch.ones(4, 4)
    example = torch.randn(3, 4, requires_grad=True)
    buffers = [b.clone() for b in net.buffers()]
    random_state = torch.get_rng_state()
    with torch.no_grad():
        partition(net, 2, by="time", example=example, verbose=False)
    assert all(map(torch.equal, net.buffers(), buffers)) and example.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert net[1].weight.grad is before and bool((before == 1).all()) and net[1].bias.grad is None
    assert [p.requires_grad for p in net.parameters()] == [True] * 4 + [False] * 2 + [True] * 2
    assert net[4](torch.ones(1, 4)).shape == (1, 2) and net.training


class Pair(Module):
    """Gives a tuple, as layers with a state do."""

    saved = ()

    def forward(self, x):
        return 2 * x, {"state": x}

    def backward(self, grad):
        back, state = grad
        return 2 * back + (0 if state is None else state["state"])


class OfPair(Module):
    """Takes a tuple as its one argument."""

    saved = ()

    def forward(self, pair):
        return pair[0] + 3 * pair[1]["state"]

    def backward(self, grad):
        return grad, {"state": 3 * grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ("parameters", "time"))
@pytest.mark.parametrize("cuts", [(1, 4), (2, 4), (3, 4), (1, 2, 4), (1, 2, 3, 4)])
def test_layers_of_a_sequential_hand_on_one_value(kind, by, cuts, monkeypatch):
    """A tuple from one layer is one argument of the next, in one stage or in two."""
    random = np.random.default_rng(0)
    x, t = random.normal(size=(6, 4)), random.normal(size=(6, 4))
    models = []
    for _ in range(2):
        linear = partial(Linear, 4, 4, dtype=np.float64)
        layers = [linear(seed=1), Pair(), OfPair(), linear(seed=2)]
        model = Sequential(*layers)
        if kind == "torch":

            class Last(torch.nn.Module):
                def forward(self, pair):
                    return pair[0] + pair[1][1][0]

            torch.manual_seed(0)
            layers = [torch.nn.Linear(4, 4), torch.nn.LSTM(4, 4), Last(), torch.nn.Linear(4, 4)]
            model = torch.nn.Sequential(*layers).double()
        models.append(model)
    if kind == "torch":
        x, t = torch.from_numpy(x), torch.from_numpy(t)
        for a, b in zip(x.split(3), t.split(3)):
            (((models[0](a) - b) ** 2).sum(dim=1).mean() / 2).backward()
    else:
        for a, b in zip(np.split(x, 2), np.split(t, 2)):
            models[0].backward(2 * (models[0](a) - b) / 6)
    monkeypatch.setitem(partition.__globals__, "divide", lambda costs, stages: list(cuts))
    parts = partition(models[1], len(cuts), by=by, example=x[:3], verbose=False)
    loss = squares if kind == "torch" else plain_squares
    mpidist.run_simulated(
        len(cuts), lambda comm: mpidist.Pipeline(parts[comm.rank], comm, 2).step(x, t, loss)
    )
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        assert np.allclose(p.grad, q.grad, rtol=1e-12, atol=1e-12)


class Undeclared(Module):
    """Keeps things under names that nobody knows, and counts for itself."""

    def __init__(self):
        self.seen = 0

    def forward(self, x):
        self.seen = self.seen + 1
        self.cached = x
        return x

    def backward(self, grad):
        self.back = getattr(self, "back", 0) + 1
        return grad * self.cached


def test_keeper_finds_what_forward_leaves():
    module = Undeclared()
    keeper, kept = Keeper(module), []
    for x in (2.0, 3.0, 5.0):
        keeper.watch()
        module(x)
        kept.append(keeper.take())
    for values, expected in zip(kept, (2.0, 3.0, 5.0)):
        keeper.put(values)
        assert module.backward(1.0) == expected
        keeper.take()
    assert (module.seen, module.back) == (3, 3)


def test_keeper_empties_those_that_declare():
    layer = Linear(2, 2)
    keeper = Keeper(layer)
    layer(np.ones((1, 2), np.float32))
    kept = keeper.take()
    assert layer._input is None and kept[0][1]["_input"].shape == (1, 2)

    class Slots:
        __slots__ = ()

    with pytest.raises(Unsupported, match="no __dict__"):
        Keeper(Slots())


def test_inherited_halves_are_not_taken_for_own():
    class Doubled(Linear):
        def backward(self, grad):
            return 2 * super().backward(grad)

        def forward(self, x):
            self.extra = x
            return super().forward(x)

    layer = Doubled(2, 2)
    layer(np.ones((1, 2), np.float32))
    expected = layer.backward(np.ones((1, 2), np.float32))
    layer(np.ones((1, 2), np.float32))
    assert np.array_equal(layer.backward_input(np.ones((1, 2), np.float32)), expected)
    assert not layer.splits and layer.saved is None and Linear(2, 2).splits


class Failing(Identity):
    def forward(self, x):
        raise ArithmeticError("this stage cannot")


def test_a_stage_that_raises():
    """It is that error which is reported; the others hear of it, and the pipeline stays broken."""

    def job(comm):
        pipe = mpidist.Pipeline(Failing() if comm.rank == 1 else Identity(), comm, 2)
        try:
            pipe.step(np.ones((2, 2)), np.ones((2, 2)), lambda y, t: (0.0, y))
        except (ArithmeticError, RankFailed) as error:
            with pytest.raises(mpidist.CommunicatorBroken, match="pipeline step"):
                pipe.step(np.ones((2, 2)))
            raise error

    with pytest.raises(ArithmeticError, match="rank 1: this stage cannot"):
        mpidist.run_simulated(3, job)


def test_a_message_that_never_comes():
    """The deadline is the communicator's, and the report says which message."""

    def drop(source, target, number):
        return dropping[0]

    dropping = [False]

    def job(comm):
        pipe = mpidist.Pipeline(Identity(), comm, 2)
        give = np.ones((2, 2)), np.ones((2, 2)), lambda y, t: (0.0, y)
        pipe.step(*give)
        comm.barrier()
        dropping[0] = True
        comm.timeout = pipe._own.timeout = 0.3
        pipe.step(*give)

    with pytest.raises(mpidist.CollectiveTimeout, match="gradient of microbatch 0 for stage 0"):
        mpidist.run_simulated(2, job, faults=mpidist.Faults(drop=drop))


# -- halves of backward in PyTorch ----------------------------------------------------------------


def shared_weight(x, p):
    return [torch.tanh(torch.tanh(x @ p[0]) @ p[0]) @ p[1]]


def two_outputs(x, p):
    h = torch.tanh(x @ p[0])
    return [h @ p[1], h * p[2]]


def beside_the_input(x, p):
    return [x @ p[0] + p[2], (p[1] * 2).sum(dim=0)]


def twice_the_same(x, p):
    beside = (p[1] * 2).sum(dim=0)
    return [x @ p[0], beside, beside]


def normed(x, p):
    return [torch.nn.functional.layer_norm(x, (4,), p[2], p[2] * 2) @ (p[0] / p[0].norm())]


def no_parameters(x, p):
    return [x * 2]


GRAPHS = (
    shared_weight,
    two_outputs,
    beside_the_input,
    twice_the_same,
    normed,
    no_parameters,
)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
@pytest.mark.parametrize("inputs", (True, False))
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_halves(graph, inputs):
    """Together they add what one backward adds; the first gives all of the inputs' gradient."""
    from mpidist.torch.halves import Halves

    if graph is no_parameters and not inputs:
        return

    def make():
        torch.manual_seed(0)
        kinds = {"dtype": torch.float64, "requires_grad": True}
        p = [torch.randn(4, 4, **kinds), torch.randn(4, 4, **kinds), torch.randn(4, **kinds)]
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=inputs)
        roots = graph(x, p)
        return x, p, roots, [torch.randn_like(root) for root in roots]

    x, p, roots, grads = make()
    torch.autograd.backward(roots, grads)
    y, q, roots, grads = make()
    halves = Halves(roots, grads, [y] if inputs else [])
    halves.inputs()
    if inputs:
        assert torch.equal(x.grad, y.grad)
    halves.weights()
    for one, other in zip(p, q):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert torch.allclose(one.grad, other.grad, rtol=1e-14)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_the_second_half_computes_nothing_twice():
    """A node is run once in each half: what comes after it is not computed again."""
    from mpidist.torch.halves import Halves

    done = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            done.append(1)
            x, w = ctx.saved_tensors
            return grad @ w.T, x.T @ grad

    x = torch.randn(2, 3, requires_grad=True)
    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(5)]
    y = x
    for w in weights:
        y = Product.apply(y, w)
    halves = Halves([y], [torch.ones_like(y)], [x])
    halves.inputs()
    assert len(done) == 5 and all(w.grad is None for w in weights)
    halves.weights()
    assert len(done) == 10 and all(w.grad is not None for w in weights)
