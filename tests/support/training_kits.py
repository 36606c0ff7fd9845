"""The same training with mpidist.nn and with PyTorch, so that one test serves both."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mpidist.nn import SGD, Adam, CrossEntropy, Linear, Module, Parameter, ReLU, Sequential
from mpidist.parallel.hooks import Compress, PowerSGD, TopK

try:
    import torch
except ImportError:
    torch = None
NEEDS_TORCH = "needs PyTorch"
needs_torch = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
RATE = 0.05


class Weights:
    """A module of bare arrays, and nothing that is not needed."""

    def __init__(self, *arrays):
        self.weights = [Parameter(np.array(a)) for a in arrays]

    def parameters(self):
        return self.weights


class Mixture(Module):
    """Experts behind a common layer; ``chosen`` is the one that is used."""

    def __init__(self, linear, experts=3):
        self.body, self.chosen = linear(6, 8), 0
        self.experts = Sequential(*(linear(8, 3) for _ in range(experts)))

    def forward(self, x):
        return self.experts.layers[self.chosen](self.body(x))

    def backward(self, grad):
        return self.body.backward(self.experts.layers[self.chosen].backward(grad))


class Plain:
    """mpidist.nn."""

    name = "plain"

    def mlp(self, seed=0, width=16):
        random = np.random.default_rng(seed)
        linear = functools.partial(Linear, seed=random, dtype=np.float64)
        return Sequential(linear(6, width), ReLU(), linear(width, width), ReLU(), linear(width, 3))

    def mixture(self, seed=0):
        random = np.random.default_rng(seed)
        return Mixture(functools.partial(Linear, seed=random, dtype=np.float64))

    def optimizers(self):
        return {
            "sgd": (SGD, {"learning_rate": RATE}),
            "momentum": (SGD, {"learning_rate": RATE, "momentum": 0.9}),
            "adam": (Adam, {"learning_rate": 0.01}),
        }

    def step(self, model, x, labels, scale):
        """Forward and backward of ``scale`` times the sum of losses."""
        criterion = CrossEntropy("sum")
        criterion(model(x), labels)
        model.backward(criterion.backward(scale))

    def inputs(self, x):
        return x

    def values(self, model):
        return [p.data for p in model.parameters()]

    def gradients(self, model):
        return [p.grad for p in model.parameters()]


class Torch:
    """PyTorch."""

    name = "torch"

    def mlp(self, seed=0, width=16):
        generator = torch.Generator().manual_seed(seed)
        layers = [torch.nn.Linear(a, b) for a, b in ((6, width), (width, width), (width, 3))]
        net = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        net = net.double()
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 4)
        return net

    def mixture(self, seed=0):
        class Mixture(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.chosen = torch.nn.Linear(6, 8), 0
                self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(3))

            def forward(self, x):
                return self.experts[self.chosen](self.body(x))

        generator, net = torch.Generator().manual_seed(seed), Mixture().double()
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 4)
        return net

    def optimizers(self):
        return {
            "sgd": (torch.optim.SGD, {"lr": RATE}),
            "momentum": (torch.optim.SGD, {"lr": RATE, "momentum": 0.9}),
            "adam": (torch.optim.Adam, {"lr": 0.01}),
        }

    def step(self, model, x, labels, scale):
        scores = model(torch.from_numpy(x))
        loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels), reduction="sum")
        (loss * scale).backward()

    def inputs(self, x):
        return torch.from_numpy(x)

    def values(self, model):
        return [p.detach().numpy() for p in model.parameters()]

    def gradients(self, model):
        return [None if p.grad is None else p.grad.numpy() for p in model.parameters()]


KITS = [
    pytest.param(Plain(), id="plain"),
    pytest.param(Torch(), id="torch", marks=needs_torch),
]


def batch(seed=3, count=24):
    """Samples and their classes."""
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 6)), random.integers(0, 3, count)


def fingerprint(kit, model):
    """The bits of all parameters."""
    return b"".join(np.ascontiguousarray(v).tobytes() for v in kit.values(model))


STEPS = 50
SMALL = {"bucket_bytes": 1200, "first_bucket_bytes": 100}  # several buckets
SMALLEST = {"bucket_bytes": 64, "first_bucket_bytes": 64}  # for layers of a few numbers
MANUAL = {**SMALL, "sync": "manual"}


def assert_identical(comm, kit, model):
    assert len(set(comm.allgather_object(fingerprint(kit, model)))) == 1


def assert_close(kit, model, alone, tolerance=1e-12):
    for mine, reference in zip(kit.values(model), kit.values(alone), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=0, atol=tolerance)


def train(comm, kit, model, optimizer, steps=STEPS, check=True, passes=1):
    """Train on this rank's part of a global batch that changes from step to step."""
    for step in range(steps):
        x, labels = batch(step)
        parts = [slice(comm.rank + k * comm.size, None, comm.size * passes) for k in range(passes)]
        optimizer.zero_grad()
        for part in parts[:-1]:
            with model.no_sync():
                kit.step(model, x[part], labels[part], comm.size / len(x))
        kit.step(model, x[parts[-1]], labels[parts[-1]], comm.size / len(x))
        model.sync_gradients()
        optimizer.step()
        if check:
            assert_identical(comm, kit, model)


def train_alone(kit, seed, optimizer_name, steps=STEPS):
    net = kit.mlp(seed)
    make, options = kit.optimizers()[optimizer_name]
    optimizer = make(net.parameters(), **options)
    for step in range(steps):
        x, labels = batch(step)
        optimizer.zero_grad()
        kit.step(net, x, labels, 1 / len(x))
        optimizer.step()
    return net


HOOKS = {
    "float16": lambda: Compress("float16"),
    "bfloat16": lambda: Compress("bfloat16"),
    "top-k": lambda: TopK(0.2),
    "powersgd": lambda: PowerSGD(rank=2),
}


def two_heads():
    """Return a module of PyTorch of which rank r uses head r % 2, and nobody the third one."""

    class TwoHeads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(3, 3)
            self.heads = torch.nn.ModuleList(torch.nn.Linear(3, 1) for _ in range(3))

        def forward(self, x, head):
            return self.heads[head](self.body(x))

    return TwoHeads()


class Faulty:
    """Saves and loads two arrays; before, it does something in one of both."""

    def __init__(self, where, act):
        self.where, self.act = where, act

    def state_dict(self):
        if self.where == "save":
            self.act()
        return {"w": np.ones(30_000)}

    def load_state_dict(self, _):
        if self.where == "load":
            self.act()
