"""Clipping of gradients over all stages, and tied parameters."""

from functools import partial

import numpy as np
import pytest

import mpidist
from mpidist.errors import (
    InvalidArgument,
    Unsupported,
)
from mpidist.nn import Adam, Linear
from tests.support.pipeline_kits import (
    COUNT,
    ROWS,
    WIDTH,
    needs_torch,
    plain_squares,
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
