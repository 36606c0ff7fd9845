"""Models and small stages for pipelines, in mpidist.nn and PyTorch, with the unsplit results."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import mpidist
from mpidist.nn import CrossEntropy, Linear, Module, Parameter, ReLU, Sequential
from mpidist.pipeline.schedules import Span, Timeline, as_schedule, simulate
from tests.support.training_kits import needs_torch, torch

WIDTHS = (6, 8, 8, 5, 8, 8, 5, 8, 3)


def data(rows, seed=3):
    """A batch and its classes."""
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, WIDTHS[0])), random.integers(0, WIDTHS[-1], rows)


def mean(function):
    """Declare that a loss function computes the mean over the rows."""
    function.reduction = "mean"
    return function


class Plain:
    """mpidist.nn."""

    name = "plain"

    def layers(self, seed=0):
        """8 blocks, so that 2, 4 and 8 stages have whole ones, and 3 unequal ones."""
        random = np.random.default_rng(seed)
        linear = functools.partial(Linear, seed=random, dtype=np.float64)
        blocks = [[linear(a, b), ReLU()] for a, b in zip(WIDTHS, WIDTHS[1:])]
        blocks[-1].pop()
        return [Sequential(*block) for block in blocks]

    def join(self, layers):
        return Sequential(*layers)

    def loss(self):
        return CrossEntropy()

    def tensor(self, x):
        return x

    def array(self, x):
        return np.asarray(x)

    def linear(self, weight):
        made = Linear(*weight.shape[::-1], bias=False, dtype=np.float64)
        made.weight.data[...] = weight
        return made

    @staticmethod
    @mean
    def squares(y, target):
        """The squares of a row's errors, added up; their mean over the rows, and its gradient."""
        error = y - target
        return float((error**2).sum(axis=1).mean()), 2 * error / len(error)

    def mixed(self, rank, size):
        return Mixed(rank, size)

    def unsplit(self, model, x, labels):
        """Loss and gradients of the whole model on one rank."""
        loss = CrossEntropy()
        value = loss(model(x), labels)
        model.backward(loss.backward())
        return value, self.gradients(model)

    def gradients(self, model):
        return [None if p.grad is None else p.grad.copy() for p in model.parameters()]

    def gradient_of_outputs(self, outputs, labels):
        """What backward() is given after forward()."""
        loss = CrossEntropy()
        loss(np.concatenate(outputs), labels)
        return loss.backward()


class Mixed(Module):
    """Multiplies by a number.

    The first stage makes a dict of what it is given, and the last one a tensor of that.
    """

    saved = ("given",)

    def __init__(self, rank, size):
        self.weight = Parameter(np.array(2.0 + rank))
        self._first, self._last = rank == 0, rank == size - 1

    def forward(self, x=None, steps=None, beside=None, note=None):
        self.given = x
        y = x * self.weight.data
        if self._first:
            beside = [y, None]
        made = {"x": y, "steps": steps, "beside": beside, "note": ("kept", 3)}
        assert self._first or (note == ("kept", 3) and beside[1] is None)
        return y + (beside[0] + steps[:, None]) if self._last else made

    def backward(self, grad):
        if self._last:
            own, beside = grad, grad
        else:
            own, beside = grad["x"], grad["beside"][0]
            assert grad["steps"] is None and grad["note"] == (None, None)
        if self._first:
            own, beside = own + beside, None
        self.weight.accumulate(np.asarray((own * self.given).sum()))
        back = own * self.weight.data
        return (
            None
            if self._first
            else {"x": back, "steps": None, "beside": [beside, None], "note": None}
        )


def torch_mixed(rank, size):
    first, last = rank == 0, rank == size - 1

    class TorchMixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(2.0 + rank, dtype=torch.float64))

        def forward(self, x, steps, beside=None, note=None):
            y = x * self.weight
            if first:
                beside = [y, None]
            assert first or (note == ("kept", 3) and beside[1] is None)
            made = {"x": y, "steps": steps, "beside": beside, "note": ("kept", 3)}
            return y + (beside[0] + steps[:, None]) if last else made

    return TorchMixed()


class Torch:
    """PyTorch."""

    name = "torch"

    def layers(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        blocks = []
        for a, b in zip(WIDTHS, WIDTHS[1:]):
            linear = torch.nn.Linear(a, b).double()
            with torch.no_grad():
                for p in linear.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)
            blocks.append(torch.nn.Sequential(linear, torch.nn.Tanh()))
        return blocks

    def join(self, layers):
        return torch.nn.Sequential(*layers)

    def loss(self):
        return torch.nn.functional.cross_entropy

    def tensor(self, x):
        return torch.from_numpy(x)

    def array(self, x):
        return x.detach().numpy()

    def linear(self, weight):
        made = torch.nn.Linear(*weight.shape[::-1], bias=False).double()
        made.weight.data.copy_(torch.from_numpy(weight))
        return made

    @staticmethod
    @mean
    def squares(y, target):
        return ((y - target) ** 2).sum(dim=1).mean()

    def mixed(self, rank, size):
        return torch_mixed(rank, size)

    def unsplit(self, model, x, labels):
        loss = self.loss()(model(self.tensor(x)), self.tensor(labels))
        loss.backward()
        return float(loss.detach()), self.gradients(model)

    def gradients(self, model):
        return [None if p.grad is None else p.grad.numpy().copy() for p in model.parameters()]

    def gradient_of_outputs(self, outputs, labels):
        whole = torch.cat([output.detach() for output in outputs]).requires_grad_()
        self.loss()(whole, torch.from_numpy(labels)).backward()
        return whole.grad


KITS = [
    pytest.param(Plain(), id="plain"),
    pytest.param(Torch(), id="torch", marks=needs_torch),
]


def chunks_of(layers, placement, rank):
    """The layers of each virtual stage of a rank, as equal as can be."""
    stages = placement.stages
    ends = [k * len(layers) // stages for k in range(stages + 1)]
    mine = [placement.stage(rank, chunk) for chunk in range(placement.chunks)]
    return [(ends[stage], ends[stage + 1]) for stage in mine]


ROWS, WIDTH, COUNT = 12, 4, 4


@mean
def squares(y, t):
    return ((y - t) ** 2).sum(dim=1).mean()


@mean
def plain_squares(y, t):
    return float(((y - t) ** 2).sum(axis=1).mean()), 2 * (y - t) / len(y)


def batch():
    torch.manual_seed(7)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.randn(
        ROWS, WIDTH, dtype=torch.float64
    )


def unsplit(stages, steps=1):
    """The microbatches one after another through the whole model."""
    x, t = batch()
    for _ in range(steps):
        for a, b in zip(x.chunk(COUNT), t.chunk(COUNT)):
            for stage in stages:
                a = stage(a)
            (squares(a, b) / COUNT).backward()


def pipelined(stages, schedule="1f1b", checkpoint=False, steps=1):
    x, t = batch()
    size = len(stages) // (2 if schedule == "zb-v" else 1)

    def job(comm):
        chunks = [stages[comm.rank]]
        if schedule == "zb-v":
            chunks = torch.nn.ModuleList([*chunks, stages[2 * size - 1 - comm.rank]])
        pipe = mpidist.Pipeline(chunks, comm, COUNT, schedule, checkpoint=checkpoint)
        for _ in range(steps):
            pipe.step(x, t, squares)

    mpidist.run_simulated(size, job)


def same(stages, others):
    for one, other in zip(stages, others):
        for p, q in zip(one.parameters(), other.parameters()):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-12, atol=1e-12)
        for b, c in zip(one.buffers(), other.buffers()):
            assert torch.allclose(b, c, rtol=1e-12)
        for m, n in zip(one.modules(), other.modules()):
            assert getattr(m, "calls", 0) == getattr(n, "calls", 0)
            assert np.allclose(getattr(m, "seen", 0), getattr(n, "seen", 0), rtol=1e-12)


def linear():
    return torch.nn.Linear(WIDTH, WIDTH)


def made(*blocks):
    torch.manual_seed(3)
    return [torch.nn.Sequential(*block()).double() for block in blocks]


def tanh():
    return [linear(), torch.nn.Tanh()]


class Reusing(Module):
    """Writes every output, and every gradient, into the same memory; changes its input."""

    saved = ()

    def __init__(self):
        self.out, self.back = np.empty((ROWS // COUNT, WIDTH)), np.empty((ROWS // COUNT, WIDTH))

    def forward(self, x):
        np.multiply(x, 2, out=self.out)
        x[...] = np.nan
        return self.out

    def backward(self, grad):
        np.multiply(grad, 2, out=self.back)
        grad[...] = np.nan
        return self.back


class Keeping(Module):
    """Keeps what it gives."""

    saved = ("_y",)

    def forward(self, x):
        self._y = np.tanh(x)
        return self._y

    def backward(self, grad):
        return grad * (1 - self._y**2)


TOLERANCE = 1e-12


class Run:
    """A pipeline over the blocks of a kit, and what the whole model gives."""

    def __init__(self, comm, kit, schedule, microbatches, rows, **options):
        self.comm, self.kit = comm, kit
        self.x, self.labels = data(rows)
        placement = as_schedule(schedule).place(comm.size)
        self.layers = kit.layers()
        self.ranges = chunks_of(self.layers, placement, comm.rank)
        self.chunks = [kit.join(self.layers[a:b]) for a, b in self.ranges]
        self.first = placement.owner(0)[0] == comm.rank
        self.last = placement.owner(placement.stages - 1)[0] == comm.rank
        stage = self.chunks if len(self.chunks) > 1 else self.chunks[0]
        self.pipe = mpidist.Pipeline(stage, comm, microbatches, schedule, **options)

    def step(self, x=None, labels=None):
        x, labels = self.x if x is None else x, self.labels if labels is None else labels
        return self.pipe.step(
            self.kit.tensor(x) if self.first else None,
            self.kit.tensor(labels) if self.last else None,
            self.kit.loss() if self.last else None,
        )

    def forget(self):
        for chunk in self.chunks:
            for p in chunk.parameters():
                p.grad = None

    def check(self, loss=None, steps=1):
        """Loss and every gradient are those of the unsplit model."""
        layers = self.kit.layers()
        expected, _ = self.kit.unsplit(self.kit.join(layers), self.x, self.labels)
        if loss is not None:
            assert abs(loss - expected) < TOLERANCE
        for (a, b), chunk in zip(self.ranges, self.chunks):
            whole = self.kit.gradients(self.kit.join(layers[a:b]))
            found = self.kit.gradients(chunk)
            assert len(found) == len(whole)
            for one, other in zip(found, whole):
                assert np.abs(one - steps * other).max() < TOLERANCE


def usable(pipe, stage):
    """All ranks can still agree on something; `pipe` is closed."""
    assert pipe.num_microbatches == 2 and pipe.schedule == "1f1b" and pipe.module is stage
    pipe.close()


def measured(name="zb-h1", late=0.05):
    """A run that took a little longer than was foreseen, seconds from some clock's zero."""
    line = simulate(name, 3, 4, costs=(0.020, 0.021, 0.018, 0.001))
    spans = tuple(
        tuple(Span(a, 7 + begin * (1 + late), 7 + end * (1 + late)) for a, begin, end in part)
        for part in line.spans
    )
    return Timeline(line.name, line.placement, line.microbatches, spans)
