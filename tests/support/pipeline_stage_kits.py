"""Small stages and batches, and a pipeline of them beside the unsplit model."""

import numpy as np
import pytest

import mpidist
from mpidist.nn import Module
from tests.support.training_kits import NEEDS_TORCH, torch

needs_torch = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)

ROWS, WIDTH, COUNT = 12, 4, 4


def squares(y, t):
    return ((y - t) ** 2).sum(dim=1).mean()


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
