"""What is kept of a forward, and recomputation, which draws the same random numbers."""

import random
import weakref

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument
from mpidist.nn import Linear, Module, ReLU, Sequential
from mpidist.pipeline.array_stage import ArrayStage
from mpidist.pipeline.stage import stage_of
from tests.support.pipeline_kits import COUNT, KITS, batch, made, needs_torch, squares, tanh, usable
from tests.support.training_kits import NEEDS_TORCH, torch


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


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_stage_of_what_is_no_stage_is_refused(comm, kit):
    """What is no stage, on all ranks or on one."""
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    with pytest.raises(InvalidArgument, match=r"chunk 0 .*\bint\b.*forward\(\)"):
        make(3, comm, 2)
    with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: Pipeline: stage=\[\]: "):
        make([], comm, 2)
    for given, told in (
        (None, "is None: "),
        ([stage, None], r"\[1\] is None: "),
        (type(stage), r"is the class Sequential\b"),
        (Module(), r"is a Module\b.*forward\(\)"),
        (mpidist.partition(stage, 2, verbose=False), r"is a Partition, .*parts\[comm.rank\]"),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 1: Pipeline: stage ?{told}"):
            make(given if comm.rank == 1 else stage, comm, 2)
    usable(make(stage, comm, 2), stage)


@pytest.mark.parametrize("kind", ("plain", "torch"))
@pytest.mark.parametrize("checkpoint", (False, True))
def test_unsplit_stage_keeps_nothing_for_w(kind, checkpoint, monkeypatch):
    """I of a stage that cannot be split leaves no memory for W."""
    if kind == "torch":
        torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
        monkeypatch.setattr("mpidist.torch.stage.can_halve", lambda: False)
        layer = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh()).double()
    else:
        inner = Sequential(Linear(4, 6, dtype=np.float64), ReLU())
        layer = Whole(inner)
    stage = stage_of(layer, "", checkpoint=checkpoint)
    assert not stage.splits
    x = stage.tensors.tensor(np.ones(8), ("float64", (2, 4), True))
    output, saved = stage.forward("tensor", [x], False, True)
    stage.finish(saved, "tensor", [output])
    there, grad = weakref.ref(x), stage.tensors.tensor(np.ones(12), ("float64", (2, 6), False))
    del x, output
    assert there() is not None
    stage.backward_input(saved, [grad])
    assert there() is None
    stage.backward_weight(saved)


class Whole:
    """A stage whose backward has no halves."""

    def __init__(self, inner):
        self.modules, self.parameters = inner.modules, inner.parameters
        self.forward, self.backward = inner.forward, inner.backward
