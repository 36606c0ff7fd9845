"""Stages cut from a Sequential: balanced, without a trace, no layer lost."""

import random
import threading
from functools import partial
from itertools import chain, cycle

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument, Unsupported
from mpidist.nn import Identity, Linear, Module, ReLU, Sequential
from mpidist.pipeline import as_schedule, partitioning
from mpidist.pipeline.partitioning import ROUNDS, Partition, divide, partition
from tests.support.pipeline_kits import plain_squares, squares
from tests.support.training_kits import NEEDS_TORCH, torch

KINDS = [
    "plain",
    pytest.param("torch", marks=pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)),
]


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
        with pytest.raises(InvalidArgument, match=rf"model .*\b{name}: .*Sequential"):
            partition(wrong, 1)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_partition_of_layers_that_work_in_place():
    """They are timed on memory of their own, and begin no stage, where autograd forbids them."""
    layers = [torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True)]
    example = -torch.ones(2, 4)
    for by in ("time", "parameters"):
        parts = partition(torch.nn.Sequential(*layers), 2, by=by, example=example)
        assert parts.layers == ((0, 1), (1, 3)) and bool((example == -1).all())
    with pytest.raises(InvalidArgument, match="stages=3: .*1 … 2"):
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
        with pytest.raises(InvalidArgument, match=f"stages={wrong!r}: .*1 … 6"):
            partition(layers, wrong)
    with pytest.raises(InvalidArgument, match="by='size'"):
        partition(layers, 2, by="size")
    with pytest.raises(InvalidArgument, match="verbose=1: "):
        partition(layers, 2, verbose=1)
    with pytest.raises(InvalidArgument, match="by='time' .*example="):
        partition(layers, 2, by="time")


def test_partition_by_time():
    """The one long layer is not put together with the next longest."""

    class Long(Identity):
        saved = ()

        def forward(self, x):
            for _ in range(200):
                x = x @ self.square
            return x

        square = np.eye(64)

    layers = [Linear(64, 64, dtype=np.float64), Long(), Identity(), Identity()]
    parts = partition(layers, 2, by="time", example=np.ones((8, 64)))
    assert parts.layers == ((0, 1), (1, 4)) and parts.costs[1] > parts.costs[0]
    assert layers[0].weight.grad is None


def test_first_round_warms_up(monkeypatch):
    """It does not count; the cost is the median of the others."""
    seconds = [9.0, 1.0, 1.0, 3.0, 3.0]
    assert len(seconds) == ROUNDS
    clock = cycle(chain.from_iterable((0.0, taken) * 2 for taken in seconds))
    monkeypatch.setattr(partitioning, "perf_counter", lambda: next(clock))
    layers = [Identity(), Identity()]
    parts = partition(layers, 2, by="time", example=np.ones((2, 3)), verbose=False)
    assert parts.costs == (4.0, 4.0)  # forward and backward


class Counting(Identity):
    """Counts and remembers, in every way; draws numbers, and changes its input."""

    saved = ()

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


def test_uncopyable_layer_is_named():
    class Locked(Identity):
        saved = ()

        def __init__(self):
            self.lock = threading.Lock()

    layers, x = [Linear(4, 4), Locked()], np.ones((2, 4), np.float32)
    with pytest.raises(Unsupported, match=r"layer 1 \(Locked\) .*by='parameters'"):
        partition(layers, 2, by="time", example=x)
    assert len(partition(layers, 2, verbose=False)) == 2


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
def test_sequential_passes_one_value(kind, by, cuts, monkeypatch):
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


def tied_model(kind):
    """Five layers, the first and the last with the same weight; an input, a target and the loss."""
    random = np.random.default_rng(0)
    x, t = random.normal(size=(6, 4)), random.normal(size=(6, 4))
    if kind == "torch":
        linear = partial(torch.nn.Linear, 4, 4, bias=False, dtype=torch.float64)
        model = torch.nn.Sequential(linear(), torch.nn.Tanh(), linear(), torch.nn.Tanh(), linear())
        for layer in (model[0], model[2]):
            layer.weight = torch.nn.Parameter(torch.from_numpy(random.normal(size=(4, 4))))
        model[4].weight = model[0].weight
        return model, torch.from_numpy(x), torch.from_numpy(t), squares
    layers = [Linear(4, 4, bias=False, seed=k, dtype=np.float64) for k in range(4)]
    model = Sequential(*layers, Linear(4, 4, bias=False, dtype=np.float64))
    model.layers[4].weight = model.layers[0].weight
    return model, x, t, plain_squares


@pytest.mark.parametrize("given", [False, True], ids=["found", "given"])
@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb-v", 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights(kind, schedule, chunks, given):
    """A weight that two stages share has the gradient of the whole model, on both."""
    model, x, t, loss = tied_model(kind)
    if kind == "torch":
        for a, b in zip(x.split(3), t.split(3)):
            (((model(a) - b) ** 2).sum(dim=1).mean() / 2).backward()
    else:
        for a, b in zip(np.split(x, 2), np.split(t, 2)):
            model.backward(2 * (model(a) - b) / 6)
    expected = [np.asarray(p.grad) for p in model.parameters()]

    def rank_main(comm):
        own, x, t, loss = tied_model(kind)
        parts = partition(own, 2 * chunks, verbose=False)
        assert parts.tied == {"0.weight": (0, 2 * chunks - 1)}
        assert f"tied: 0.weight in stages 0, {2 * chunks - 1}" in str(parts)
        place = as_schedule(schedule).place(comm.size)
        mine = [place.stage(comm.rank, chunk) for chunk in range(chunks)]
        held = [parts[k] for k in mine]
        weight = next(iter(own.parameters()))
        tied = {"ends": weight} if given and {0, 2 * chunks - 1} & set(mine) else None
        tied = None if chunks == 2 else tied  # both ends on rank 0: it is one parameter
        pipe = mpidist.Pipeline(held if chunks > 1 else held[0], comm, 2, schedule, tied=tied)
        for _ in range(2):
            pipe.step(x, t, loss)
            for k, p in enumerate(own.parameters()):
                if p.grad is not None:
                    np.testing.assert_allclose(np.asarray(p.grad), expected[k], atol=1e-12)
                    p.grad = None

    mpidist.run_simulated(2, rank_main)
