"""What layers of PyTorch do inside stages: statistics, buffers, work in place; what is no stage."""

import re
from functools import partial

import pytest

import mpidist
from mpidist.errors import InvalidArgument
from tests.support.pipeline_kits import (
    COUNT,
    ROWS,
    WIDTH,
    batch,
    linear,
    made,
    needs_torch,
    pipelined,
    same,
    squares,
    tanh,
    unsplit,
)
from tests.support.training_kits import torch


def normed():
    return [linear(), torch.nn.BatchNorm1d(WIDTH), torch.nn.Tanh()]


def spectral():
    return [torch.nn.utils.parametrizations.spectral_norm(linear()), torch.nn.Tanh()]


def rectified(inplace):
    return [torch.nn.ReLU(inplace), linear(), torch.nn.Tanh()]


def doubled(inplace):
    class Doubled(torch.nn.Module):
        def forward(self, x):
            return x.mul_(2) if inplace else x * 2

    return [Doubled(), linear(), torch.nn.Sigmoid()]


def checkpointed(reentrant):
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            run = torch.utils.checkpoint.checkpoint
            return run(self.inner, x, use_reentrant=reentrant)

    return [Checkpointed(), torch.nn.Tanh()]


def transformed(here):
    class Transformed(torch.nn.Module):
        """1 - tanh²; has changed its input and a buffer before."""

        def __init__(self):
            super().__init__()
            self.inner = linear()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            y = self.inner(x.mul_(2) if here else x * 2)
            if not here:
                return 1 - torch.tanh(y) ** 2
            return torch.func.vjp(torch.tanh, y)[1](torch.ones_like(y))[0]

    return [Transformed()]


def moving(attributes=True):
    """A buffer that is assigned anew, one that seldom moves, a list, an attribute that is late."""

    class Moving(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("scale", torch.ones(WIDTH))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(dim=0)
            if attributes:
                self.calls += 1
                self.seen.append(float(x.detach().mean()))
                if self.calls == 2:
                    self.late = 0.5
            self.count += 1
            if self.count % 3 == 2:
                self.scale *= 2
            x = x * self.scale.clone()
            return x + self.mean * self.calls + sum(self.seen) + getattr(self, "late", 0)

    return [linear(), Moving(), torch.nn.Tanh()]


BLOCKS = {
    "moving": (moving, moving),
    "moving buffers": (partial(moving, False), partial(moving, False)),
    "normed": (normed, normed),
    "spectral": (spectral, spectral),
    "rectified": (partial(rectified, True), partial(rectified, False)),
    "doubled": (partial(doubled, True), partial(doubled, False)),
    "reentrant": (partial(checkpointed, True), tanh),
    "checkpointed": (partial(checkpointed, False), tanh),
    "transformed": (partial(transformed, True), partial(transformed, False)),
}


# torch.utils.checkpoint runs forward twice, and attributes other than buffers change twice; and it
# needs hooks on saved tensors, which torch.func refuses.
NOT_TWICE = ("moving", "transformed")


def ways(names):
    """Pairs of a name and of checkpoint."""
    return [(n, checkpoint) for n in names for checkpoint in (False, True)[: 2 - (n in NOT_TWICE)]]


@needs_torch
@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1", "zb-v"))
@pytest.mark.parametrize("name, checkpoint", ways(BLOCKS))
def test_layers(name, schedule, checkpoint):
    """Gradients and buffers are those of the same microbatches without a pipeline."""
    block, plain = BLOCKS[name]
    later = 3 if schedule == "zb-v" else 1
    stages, others = made(tanh, *[block] * later), made(tanh, *[plain] * later)
    unsplit(others, 2)
    pipelined(stages, schedule, checkpoint, 2)
    same(stages, others)


@needs_torch
@pytest.mark.parametrize("name, checkpoint", ways(("rectified", "doubled", "transformed")))
def test_a_first_stage_that_works_in_place(name, checkpoint):
    """The parts of the batch are changed one by one, as the whole would be; autograd learns it."""
    block, plain = BLOCKS[name]
    stages, others = made(block, tanh), made(plain, tanh)
    unsplit(others)
    x, t = batch()
    before, factor = x.clone(), torch.ones(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    beside = (factor * x).sum()

    def job(comm):
        pipe = mpidist.Pipeline(stages[comm.rank], comm, COUNT, checkpoint=checkpoint)
        pipe.step(x, t, squares)

    mpidist.run_simulated(2, job)
    same(stages, others)
    assert torch.equal(x, before.relu() if name == "rectified" else 2 * before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        beside.backward()


@needs_torch
def test_torch_func_in_a_checkpointed_stage():
    """PyTorch's own error, on the rank of that stage."""
    with pytest.raises(RuntimeError, match="rank 1: torch.func.* saved tensor hooks"):
        pipelined(made(tanh, partial(transformed, True)), checkpoint=True)


@needs_torch
@pytest.mark.parametrize("how", ("frozen", "evaluated"))
@pytest.mark.parametrize("which", (0, 1))
@pytest.mark.parametrize("way", ("step", "checkpoint", "halves"))
def test_frozen_and_evaluated_stages(how, which, way):
    """One stage learns nothing, or has fixed statistics; the other goes on."""
    stages, others = made(normed, normed), made(normed, normed)
    for model in (stages, others):
        if how == "frozen":
            model[which].requires_grad_(False)
        else:
            model[which].eval()
    unsplit(others)
    if way != "halves":
        pipelined(stages, checkpoint=way == "checkpoint")
    else:
        x, t = batch()

        def job(comm):
            pipe = mpidist.Pipeline(stages[comm.rank], comm, COUNT, "gpipe")
            outputs = pipe.forward(x)
            pipe.backward([2 * (y.detach() - u) / ROWS for y, u in zip(outputs, t.chunk(COUNT))])

        mpidist.run_simulated(2, job)
    same(stages, others)


@needs_torch
def test_what_is_no_stage():
    layer = torch.nn.Linear(2, 2)
    wrong = (
        (torch.nn.ModuleDict({"a": layer}), "stage is a ModuleDict"),
        (torch.nn.ParameterList([layer.weight]), "stage is a ParameterList"),
        (torch.nn.ModuleList([layer, torch.nn.ModuleList()]), "stage[1] is a ModuleList"),
        (torch.nn.ModuleList(), "stage=ModuleList(): "),
        (torch.nn.ReLU, "stage is the class ReLU"),
        (layer.weight, "Parameter: "),
    )

    def job(comm):
        for given, told in wrong:
            with pytest.raises(InvalidArgument, match=re.escape(told)):
                mpidist.Pipeline(given if comm.rank == 0 else layer, comm, 2)

    mpidist.run_simulated(2, job)


@needs_torch
def test_tensors_between_stages_are_the_memory_they_show():
    from mpidist.torch.stage import TorchTensors
    from tests.support.odd_arrays import odd_tensors, waiting

    for send in (TorchTensors().array, TorchTensors().own):
        assert send(waiting(torch.arange(3.0))).tolist() == [0, 1, 2]
        for x, word, *_ in odd_tensors(4):
            with pytest.raises(InvalidArgument, match=f"between stages is .*{word}"):
                send(x)
