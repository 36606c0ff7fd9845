"""What is kept of a forward, and recomputation, which draws the same random numbers."""

import random

import numpy as np
import pytest

import mpidist
from mpidist.errors import (
    InvalidArgument,
)
from mpidist.nn import Linear, Module, Sequential
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
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: .*\btraining\b"):
            pipe.backward(t)
        stage.train()
        with torch.set_grad_enabled(comm.rank == 0):
            with pytest.raises(InvalidArgument, match=r"\[1\]"):
                pipe.forward(x)
        pipe.forward(x)
        pipe.step(x, t, squares)  # what the forward kept is gone
        with pytest.raises(InvalidArgument, match=r"backward\(\).*forward\(\)"):
            pipe.backward(t)

    mpidist.run_simulated(2, job)


@needs_torch
def test_recomputation_draws_the_same_numbers():
    """In layers and in the loss; the generator goes on as if nothing was computed again."""
    from mpidist.torch.stage import stage

    class Loss:
        def tensor(self, output):
            return torch.nn.functional.dropout(output, 0.5).sum()

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * random.random()

    grads, after = [], []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), Scaled())
        worker, kept = stage(net, net, "", checkpoint), []
        for x in torch.randn(2, 4, 8):
            _, saved = worker.forward("tensor", [x], True, True, Loss())
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
def test_checkpointed_stages_keep_only_their_input():
    """As many elements as autograd saves without: none, but for the input."""
    from mpidist.torch.stage import stage

    def saved_elements(checkpoint):
        net = torch.nn.Sequential(*[torch.nn.Linear(8, 8), torch.nn.Tanh()] * 3)
        worker = stage(net, net, "", checkpoint)
        x = torch.randn(4, 8, requires_grad=True)
        noted = []

        def pack(saved):
            noted.append(saved.numel())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output, saved = worker.forward("tensor", [x], False, True)
        worker.finish(saved, "tensor", [output])
        worker.backward(saved, [torch.ones_like(output)])
        assert x.grad is None and net[0].weight.grad is not None
        return sum(noted)

    assert saved_elements(True) <= 4 * 8 < 6 * 4 * 8 <= saved_elements(False)


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
    from mpidist.pipeline.array_stage import ArrayStage

    grads = []
    for checkpoint in (False, True):
        np.random.seed(0)
        random.seed(0)
        net = Sequential(Linear(4, 4, dtype=np.float64), Noise(1))
        worker, kept = ArrayStage(net, net, "", checkpoint), []
        for x in np.ones((3, 2, 4)):
            output, saved = worker.forward("tensor", [x], True, True)
            worker.finish(saved, "tensor", [output])
            kept.append(saved)
            assert (saved.layers is None) == checkpoint
        state = random.getstate(), np.random.get_state()[1].tolist()
        for saved in kept:
            worker.backward(saved, [np.ones((2, 4))])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == state
        grads.append(net.layers[0].weight.grad)
    assert np.array_equal(*grads)
