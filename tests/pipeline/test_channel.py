"""What stages hand on: memory used again, dtypes, what cannot be sent, missing gradients."""

import re

import numpy as np
import pytest

import mpidist
from mpidist import Communicator
from mpidist.bench.pipelines import no_loss
from mpidist.errors import InvalidArgument, RankFailed, UnsupportedDtype
from mpidist.nn import Identity, Linear, Module, Sequential
from tests.support.pipeline_kits import (
    COUNT,
    KITS,
    ROWS,
    WIDTH,
    Keeping,
    Reusing,
    Run,
    data,
    plain_squares,
)


@pytest.mark.parametrize("schedule", ("gpipe", "zb-h1", "zb-v"))
@pytest.mark.parametrize("checkpoint", (False, True))
def test_memory_that_a_layer_uses_again(schedule, checkpoint, monkeypatch):
    """It may: what is under way, and what another chunk of the rank has, is apart from it."""
    sent = []
    send = Communicator.post_send

    def noting(self, data, peer, tag):
        sent.append((data, data.copy()))
        return send(self, data, peer, tag)

    monkeypatch.setattr(Communicator, "post_send", noting)
    x = np.random.default_rng(0).uniform(size=(ROWS, WIDTH))
    size = 3 if schedule == "zb-h1" else 2
    kinds = [Keeping, Reusing, Keeping, Reusing][: 2 * size if schedule == "zb-v" else size]
    first = Linear(WIDTH, WIDTH, dtype=np.float64)
    stages = [Sequential(first, kinds[0]()), *(kind() for kind in kinds[1:])]

    def job(comm):
        chunks = [stages[comm.rank]]
        if schedule == "zb-v":
            chunks.append(stages[2 * size - 1 - comm.rank])
        pipe = mpidist.Pipeline(chunks, comm, COUNT, schedule, checkpoint=checkpoint)
        return pipe.step(x.copy(), np.ones((ROWS, WIDTH)), plain_squares)

    loss = mpidist.run_simulated(size, job)[0]
    y = x @ first.weight.data.T + first.bias.data
    slope = np.ones_like(y)
    for kind in kinds:
        y = 2 * y if kind is Reusing else np.tanh(y)
        slope = slope * (2 if kind is Reusing else 1 - y**2)
    expected, grad = plain_squares(y, 1.0)
    assert abs(loss - expected) < 1e-12
    assert np.allclose(first.weight.grad, (grad * slope).T @ x, rtol=1e-12, atol=1e-12)
    assert sent and all(np.array_equal(now, then) for now, then in sent)


def test_outputs_are_memory_of_their_own():
    """Where the last layer writes each of them into the same."""
    x = np.arange(ROWS * WIDTH, dtype=np.float64).reshape(ROWS, WIDTH)

    def job(comm):
        pipe = mpidist.Pipeline(Reusing() if comm.rank else Keeping(), comm, COUNT)
        outputs = pipe.forward(x)
        assert not comm.rank or np.array_equal(np.concatenate(outputs), 2 * np.tanh(x))

    mpidist.run_simulated(2, job)


class Giving(Module):
    """Gives its input doubled, and what `beside` makes of it."""

    saved = ()

    def __init__(self, beside):
        self.beside = beside

    def forward(self, x):
        return 2 * x, self.beside(x)

    def backward(self, grad):
        assert grad[1] is None or grad[1].dtype.isnative
        return 2 * grad[0] + (0 if grad[1] is None else grad[1].real.astype(float))


class Taking(Module):
    """Adds up its two inputs."""

    saved = ("kinds",)

    def forward(self, x, beside):
        self.kinds = x.dtype, beside.dtype
        return x + beside.astype(complex).real

    def backward(self, grad):
        wants = self.kinds[1].kind in "fc"
        return grad.astype(self.kinds[0]), grad.astype(self.kinds[1]) if wants else None


@pytest.mark.parametrize("dtype", (">f8", ">f4", "f2", ">u2", "?", ">c16", "g", ">M8[s]"))
def test_dtypes_between_stages_of_numpy(dtype):
    """Bytes arrive as numbers of this machine, gradients too."""
    layer = Linear(WIDTH, WIDTH, bias=False, dtype=np.float64)
    layer.weight.data[...] = np.eye(WIDTH)
    x = np.arange(ROWS * WIDTH, dtype=np.float64).reshape(ROWS, WIDTH) % 5
    kind = np.dtype(dtype)

    def job(comm):
        first = Sequential(layer, Giving(lambda y: y.astype(kind)))
        pipe = mpidist.Pipeline(Taking() if comm.rank else first, comm, COUNT)
        return [pipe.step(x, np.zeros_like(x), plain_squares) for _ in range(2)]

    beside = x.astype(kind).astype(complex).real
    expected, grad = plain_squares(2 * x + beside, 0.0)
    assert mpidist.run_simulated(2, job)[0] == pytest.approx([expected] * 2, rel=1e-12)
    factor = 3 if kind.kind in "fc" else 2
    rounding = 1e-3 if kind.itemsize == 2 else 1e-6 if kind.itemsize == 4 else 1e-12
    assert np.allclose(layer.weight.grad, 2 * factor * grad.T @ x, rtol=rounding)


class Narrow(Module):
    """Gives the first columns of its input."""

    saved = ()
    width = 0

    def forward(self, x):
        return x[:, : self.width]

    def backward(self, grad):
        return np.zeros((len(grad), WIDTH))


def test_values_without_elements():
    """They are one message too, also if the next step's have another shape."""
    x = np.arange(ROWS * WIDTH, dtype=np.float64).reshape(ROWS, WIDTH) % 5
    widths = (0, 0, 3, 0)

    def total(y, target):
        return float(y.sum()), np.ones_like(y)

    def job(comm):
        stage = Keeping() if comm.rank else Narrow()
        pipe, losses = mpidist.Pipeline(stage, comm, COUNT), []
        for width in widths:
            if comm.rank == 0:
                stage.width = width
            losses.append(pipe.step(x, x, total, reduction="sum"))
        return losses

    losses = mpidist.run_simulated(2, job)[0]
    assert losses == pytest.approx([np.tanh(x[:, :width]).sum() / ROWS for width in widths])


def words(x):
    return np.array([["a"]] * len(x), dtype="S4")


def numbers(y):
    return (y > 0).astype(int)


class Only(Module):
    """Gives what `made` makes of its input, and has a parameter."""

    saved = ()

    def __init__(self, made):
        self.made, self.weight = made, Linear(1, 1).weight

    def forward(self, x):
        return self.made(x)

    def backward(self, grad):
        raise ArithmeticError("no way back")


NO_TENSOR = r"the output of a stage is .* at least one in them"

WRONG = (
    (Giving(lambda x: x.astype(object)), "rank 0, stage 0: an array of dtype object .* expected"),
    (Giving(words), r"rank 0, stage 0: an array of dtype \|S4 between stages"),
    (Giving(lambda x: np.zeros(len(x), "f4,f4")), r"stage 0: an array of dtype \[\('f0', '<f4'"),
    (Giving(iter), "rank 0, stage 0: the output of a stage has a .*iterator"),
    (Only(lambda x: None), f"rank 0, stage 0: {NO_TENSOR}"),
    (Only(lambda x: "text"), f"rank 0, stage 0: {NO_TENSOR}"),
    (Only(numbers), "rank 0, stage 0: Only .*int64"),
    (Only(np.tanh), "no way back"),
)


@pytest.mark.parametrize("stage, told", WRONG)
def test_errors_on_every_rank(stage, told):
    heard = [None, None]

    def job(comm):
        pipe = mpidist.Pipeline(Keeping() if comm.rank else stage, comm, COUNT)
        try:
            pipe.step(np.ones((ROWS, WIDTH)), np.ones((ROWS, WIDTH)), plain_squares)
        except Exception as error:
            heard[comm.rank] = error
            raise

    with pytest.raises((UnsupportedDtype, InvalidArgument, ArithmeticError), match=told):
        mpidist.run_simulated(2, job)
    assert isinstance(heard[1], RankFailed) and re.search(told, str(heard[1]))
    if told == "no way back" and hasattr(heard[0], "add_note"):
        assert heard[0].__notes__[0] == "rank 0, stage 0: in B(0) of a pipeline"


class Unused(Module):
    """Gives two outputs, of which the next stage has a gradient for one."""

    saved = ()

    def forward(self, x):
        return {"x": x, "beside": x * 2}

    def backward(self, grad):
        assert grad["beside"].shape == grad["x"].shape and not grad["beside"].any()
        return grad["x"] + 2 * grad["beside"]


class First(Module):
    """Leaves one of its inputs alone."""

    saved = ()

    def forward(self, x, beside):
        return x

    def backward(self, grad):
        return {"x": grad, "beside": None}


def test_missing_gradient_is_zero():
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH))
    layer = Linear(WIDTH, WIDTH, dtype=np.float64)

    def job(comm):
        stage = Sequential(layer, Unused()) if comm.rank == 0 else First()
        pipe = mpidist.Pipeline(stage, comm, COUNT)
        pipe.step(x, np.zeros((ROWS, WIDTH)), plain_squares)
        if comm.rank == 0:
            y = x @ layer.weight.data.T + layer.bias.data
            assert np.allclose(layer.weight.grad, (2 * y / ROWS).T @ x)
            layer.zero_grad()
        halves = mpidist.Pipeline(stage, comm, COUNT, "gpipe")
        halves.forward(x)
        halves.backward([None] * COUNT)
        assert comm.rank == 1 or not layer.weight.grad.any()

    mpidist.run_simulated(2, job)


@pytest.mark.ranks(2, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kit", KITS)
def test_other_batch_sizes_are_announced_once(comm, kit):
    """Other batch sizes are announced, once for each microbatch and edge; the old ones too."""
    run, told = Run(comm, kit, "1f1b", 3, 11), []
    for rows in (11, 11, 7, 7, 11):
        run.x, run.labels = data(rows)
        run.forget()
        run.check(run.step())
        told.append(run.pipe.stats().announced)
    edges = (comm.rank < comm.size - 1) + (comm.rank > 0)
    changes = np.diff([0, *told]) / (3 * edges)
    assert changes.tolist() == [1, 0, 1, 0, 1]


def test_message_that_never_comes_is_named():
    """The deadline is the communicator's, and the report says which message."""

    def drop(source, target, number):
        return dropping[0]

    dropping = [False]

    def job(comm):
        pipe = mpidist.Pipeline(Identity(), comm, 2)
        give = np.ones((2, 2)), np.ones((2, 2)), no_loss
        pipe.step(*give)
        comm.barrier()
        dropping[0] = True
        comm.timeout = pipe._own.timeout = 3.0
        pipe.step(*give)

    with pytest.raises(mpidist.CollectiveTimeout, match="gradient of microbatch 0 for stage 0"):
        mpidist.run_simulated(2, job, faults=mpidist.Faults(drop=drop))
