"""What is kept of a forward, and recomputation, which draws the same random numbers."""

import random

import numpy as np
import pytest

import mpidist
from mpidist.errors import (
    InvalidArgument,
)
from mpidist.nn import Linear, Module, Sequential
from mpidist.pipeline.stage import Recomputing
from tests.support.pipeline_kits import (
    COUNT,
    batch,
    made,
    needs_torch,
    squares,
    tanh,
)
from tests.support.training_kits import torch


@needs_torch
def test_the_ranks_agree_on_what_is_kept():
    x, t = batch()

    def job(comm):
        stage = made(tanh)[0]
        pipe = mpidist.Pipeline(stage, comm, COUNT, "gpipe")
        stage.eval()
        outputs = pipe.forward(x)
        assert not outputs or not outputs[0].requires_grad
        with pytest.raises(InvalidArgument, match="at least one stage must be in training"):
            pipe.backward(t)
        stage.train()
        with torch.set_grad_enabled(comm.rank == 0):
            with pytest.raises(InvalidArgument, match=r"on ranks \[1\] of 2 only"):
                pipe.forward(x)
        pipe.forward(x)
        pipe.step(x, t, squares)  # what the forward kept is gone
        with pytest.raises(InvalidArgument, match="backward"):
            pipe.backward(t)

    mpidist.run_simulated(2, job)


@needs_torch
def test_recomputation_draws_the_same_numbers():
    """In layers and in the loss; the generator goes on as if nothing was computed again."""
    from mpidist.torch.stage import stage

    class Loss:
        def value(self, output):
            return float(self.tensor(output))

        def tensor(self, output):
            return torch.nn.functional.dropout(output, 0.5).sum()

        def given(self):
            return []

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * random.random()

    grads, after = [], []
    for wrap in (lambda s: s, Recomputing):
        torch.manual_seed(0)
        random.seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), Scaled())
        worker, kept = wrap(stage(net, net, "")), []
        for x in torch.randn(2, 4, 8):
            output, saved = worker.forward(x, None, [], True, True)
            worker.attach_loss(saved, output, Loss())
            kept.append(saved)
        after.append(torch.get_rng_state())
        python = random.getstate()
        for saved in kept:
            worker.backward(saved, None)
        assert torch.equal(torch.get_rng_state(), after[0])
        assert random.getstate() == python
        grads.append(net[0].weight.grad)
    assert torch.equal(*grads) and torch.equal(*after)


@needs_torch
def test_recomputation_is_in_the_autocast_of_forward():
    """Even if the way back is outside of it."""
    grads, x = [], batch()[0].float()
    for checkpoint in (False, True):
        stages = [block.float() for block in made(tanh, tanh)]

        def job(comm, checkpoint=checkpoint, stages=stages):
            pipe = mpidist.Pipeline(stages[comm.rank], comm, 2, "gpipe", checkpoint=checkpoint)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = pipe.forward(x)
            pipe.backward([torch.ones_like(y) for y in outputs])

        mpidist.run_simulated(2, job)
        grads.append([p.grad for stage in stages for p in stage.parameters()])
    for one, other in zip(*grads):
        assert torch.equal(one, other)


class Noise(Module):
    """Multiplies by random numbers: Python's, numpy's own, and those of its generator."""

    saved = ("factor",)

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def forward(self, x):
        self.factor = self.random.normal(size=x.shape) + np.random.random(x.shape)
        self.factor += random.random()
        return x * self.factor

    def backward(self, grad):
        return grad * self.factor


def test_recomputation_draws_the_same_numbers_of_numpy():
    from mpidist.pipeline.array_stage import PlainStage

    grads = []
    for wrap in (lambda s: s, Recomputing):
        np.random.seed(0)
        random.seed(0)
        net = Sequential(Linear(4, 4, dtype=np.float64), Noise(1))
        worker, kept = wrap(PlainStage(net, net, "")), []
        for x in np.ones((3, 2, 4)):
            output, saved = worker.forward(x, None, [], True)
            worker.finish(saved, "tensor", [output])
            kept.append(saved)
        for saved in kept:
            worker.backward(saved, [np.ones((2, 4))])
        grads.append(net.layers[0].weight.grad)
    assert np.array_equal(*grads)
