"""Replicas of stages, clipping over all of them, and tied parameters."""

from functools import partial

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument, Unsupported
from mpidist.nn import Adam, Linear
from mpidist.pipeline.schedules import as_schedule
from tests.support.pipeline_kits import (
    COUNT,
    KITS,
    ROWS,
    TOLERANCE,
    WIDTH,
    chunks_of,
    data,
    needs_torch,
    plain_squares,
    usable,
)
from tests.support.training_kits import torch


def test_what_clipping_and_tying_refuse():
    """A ZeroOptimizer divides gradients: neither can be done with parts."""

    def job(comm):
        grid = mpidist.Grid(comm, data=2)
        layer = Linear(WIDTH, WIDTH, dtype=np.float64)
        model = mpidist.DDP(layer, grid.data)
        mpidist.ZeroOptimizer(Adam, model)
        x = np.ones((ROWS, WIDTH))
        pipe = mpidist.Pipeline(model, grid.pipe, COUNT)
        pipe.step(x, x, plain_squares)
        with pytest.raises(Unsupported, match=r"clip_gradients\(\) of a Pipeline with a Zero"):
            pipe.clip_gradients(1.0)
        tied = mpidist.Pipeline(model, grid.pipe, COUNT, tied={"w": layer.weight})
        with pytest.raises(InvalidArgument, match=r"tied=\['w'\] with a ZeroOptimizer"):
            tied.step(x, x, plain_squares)

    mpidist.run_simulated(4, job)


def test_clipping_counts_tied_parameters_once():
    """The norm is that over all stages; what is tied is scaled everywhere."""
    random = np.random.default_rng(2)
    x, t = random.normal(size=(ROWS, WIDTH)), random.normal(size=(ROWS, WIDTH))
    linear = partial(Linear, WIDTH, WIDTH, bias=False, dtype=np.float64)
    stages = [linear(seed=k) for k in range(3)]

    def job(comm):
        stage = stages[comm.rank]
        tied = {"ends": stage.weight} if comm.rank != 1 else None
        pipe = mpidist.Pipeline(stage, comm, COUNT, tied=tied)
        pipe.step(x, t, plain_squares)
        before = stage.weight.grad.copy()
        return pipe.clip_gradients(0.5), before, stage.weight.grad

    found = mpidist.run_simulated(3, job)
    assert np.array_equal(found[0][1], found[2][1])
    expected = np.sqrt((found[0][1] ** 2).sum() + (found[1][1] ** 2).sum())
    for norm, before, after in found:
        assert norm == pytest.approx(expected, rel=1e-14) and norm > 0.5
        assert np.allclose(after, before * 0.5 / norm, rtol=1e-14)


@needs_torch
def test_sparse_gradients_of_tied_embeddings():
    """They become plain ones, as in a DDP; a second step adds to the first."""
    x = torch.arange(ROWS).reshape(ROWS, 1) % 3
    t = torch.zeros(ROWS, 1, WIDTH, dtype=torch.float64)

    def gradient(sparse, steps):
        torch.manual_seed(0)
        first = torch.nn.Embedding(WIDTH, WIDTH, sparse=sparse).double()
        last = torch.nn.Linear(WIDTH, WIDTH, bias=False).double()

        def job(comm):
            stage = last if comm.rank else first
            pipe = mpidist.Pipeline(stage, comm, COUNT, tied={"w": stage.weight})
            for _ in range(steps):
                pipe.step(x, t, torch.nn.functional.mse_loss)

        mpidist.run_simulated(2, job)
        assert torch.equal(first.weight.grad, last.weight.grad)
        return first.weight.grad

    for steps in (1, 2):
        assert torch.allclose(gradient(True, steps), steps * gradient(False, 1), rtol=1e-12)


def check_replicas(comm, kit, schedule):
    """Grid(data=2): each replica has its rows, unequally many; gradients are those of all rows."""
    grid = mpidist.Grid(comm, data=2)
    x, labels = data(18)
    mine = slice(0, 11) if grid.data_index == 0 else slice(11, 18)
    placement = as_schedule(schedule).place(grid.pipe.size)
    layers = kit.layers(seed=grid.data_index)  # the first replica's are taken over
    ranges = chunks_of(layers, placement, grid.pipe.rank)
    models = [mpidist.DDP(kit.join(layers[a:b]), grid.data) for a, b in ranges]
    pipe = mpidist.Pipeline(models if len(models) > 1 else models[0], grid.pipe, 3, schedule)
    whole = kit.layers()
    expected, _ = kit.unsplit(kit.join(whole), x, labels)
    for _ in range(20):  # DDP tries ways of overlapping meanwhile
        for model in models:
            model.zero_grad()
        loss = pipe.step(kit.tensor(x[mine]), kit.tensor(labels[mine]), kit.loss())
        assert abs(loss - expected) < TOLERANCE
        for (a, b), model in zip(ranges, models):
            for one, other in zip(kit.gradients(model), kit.gradients(kit.join(whole[a:b]))):
                assert np.abs(one - other).max() < TOLERANCE
    pipe.close()


class TiedRun:
    """4 → 4 in every stage, the first and the last with the same weights."""

    def __init__(self, comm, kit, schedule, data=None):
        self.kit, random = kit, np.random.default_rng(1)
        self.x, self.target = random.normal(size=(2, 10, 4))
        self.ends = random.normal(size=(4, 4))
        placement = as_schedule(schedule).place(comm.size)
        self.stages = placement.stages
        mine = [placement.stage(comm.rank, chunk) for chunk in range(placement.chunks)]
        # Values that differ at first: those of the first stage are taken over.
        layers = [kit.linear(np.full((4, 4), 0.25) if s else self.ends) for s in mine]
        self.tied = [m.weight for s, m in zip(mine, layers) if s in (0, self.stages - 1)]
        rows = slice(0, 10)
        if data is not None:
            layers = [mpidist.DDP(layer, data) for layer in layers]
            rows = (slice(0, 4), slice(4, 10))[data.rank]
        self.given = kit.tensor(self.x[rows]), kit.tensor(self.target[rows]), kit.squares
        tied = {"ends": self.tied if len(self.tied) > 1 else self.tied[0]} if self.tied else None
        self.pipe = mpidist.Pipeline(layers, comm, 3, schedule, tied=tied)

    def check(self):
        expected, whole = self.unsplit()
        for steps in (1, 2):
            assert abs(self.pipe.step(*self.given) - expected) < TOLERANCE
            for p in self.tied:
                assert np.abs(self.kit.array(p.data) - self.ends).max() == 0
                assert np.abs(self.kit.array(p.grad) - steps * whole).max() < TOLERANCE
        self.pipe.close()

    def unsplit(self):
        values = [self.ends, *[np.full((4, 4), 0.25)] * (self.stages - 2), self.ends]
        y, inputs = self.x, []
        for value in values:
            inputs.append(y)
            y = y @ value.T
        loss = ((y - self.target) ** 2).sum(axis=1).mean()
        grad, whole = 2 * (y - self.target) / len(y), np.zeros((4, 4))
        for k in reversed(range(len(values))):
            if k in (0, len(values) - 1):
                whole += grad.T @ inputs[k]
            grad = grad @ values[k]
        return loss, whole


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_tied_parameters_are_as_one_used_twice(comm, kit):
    """The same weights at both ends: as if one parameter were used twice.

    With zb-v one rank has both ends.
    """
    for schedule in ("1f1b", "zb-v"):
        TiedRun(comm, kit, schedule).check()


def check_tied_replicas(comm, kit, schedule):
    """Gradients go into their mean over the replicas and into the sum over the stages."""
    grid = mpidist.Grid(comm, data=2)
    TiedRun(grid.pipe, kit, schedule, grid.data).check()


def on_four(comm, check, *arguments):
    """Call `check` on a communicator of the first four ranks; the others stay out."""
    four = comm.split(0 if comm.rank < 4 else None)
    if four is not None:
        check(four, *arguments)
    comm.barrier()


@pytest.mark.ranks(4)
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1", "zb-v"))
def test_replicas_have_the_gradients_of_all_rows(comm, kit, schedule):
    on_four(comm, check_replicas, kit, schedule)


@pytest.mark.ranks(4)
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("schedule", ("1f1b", "zb-v"))
def test_tied_replicas_are_summed_and_averaged(comm, kit, schedule):
    on_four(comm, check_tied_replicas, kit, schedule)


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_tied_wrong_parameters_are_refused(comm, kit):
    """What is no parameter, or not tied by one name on several ranks."""
    stage, make = kit.join(kit.layers()), mpidist.Pipeline
    with pytest.raises(InvalidArgument, match="tied: 'w' .*rank 0: "):
        make(stage, comm, 2, tied={"w": next(iter(stage.parameters()))} if comm.rank == 0 else None)
    weight = next(iter(stage.parameters()))
    for given, message in (
        (3, "rank 0: Pipeline: tied=3: "),
        ({"w": 3}, r"rank 0: Pipeline: tied\['w'\] .*\bint\b"),
        ({3: stage}, r"rank 0: Pipeline: tied .*\b3: "),
        ({"w": []}, r"rank 0: Pipeline: tied\['w'\] is \[\]: "),
        ({"w": [weight, weight]}, r"tied: 'w' .*float64\[.*\] on rank 0: "),
        ({"w": weight, "v": weight}, "rank 0: Pipeline: tied .*'w'.*'v'"),
        ({"w": Unreadable()}, r"rank 0: .*tied\['w'\] .*RuntimeError: not yet"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            make(stage, comm, 2, tied=given if comm.rank == 0 else None)
    usable(make(stage, comm, 2), stage)


class Unreadable:
    """A parameter that has no values, as those of PyTorch's lazy modules."""

    grad = None

    @property
    def data(self):
        raise RuntimeError("not yet")
