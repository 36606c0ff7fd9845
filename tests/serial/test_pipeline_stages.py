"""What layers do inside stages: statistics, random numbers, memory that is used again."""

import random
import re
from functools import partial

import numpy as np
import pytest
from training_kits import NEEDS_TORCH, torch

import mpidist
from mpidist.errors import (
    CommunicatorBroken,
    InvalidArgument,
    RankFailed,
    ScheduleError,
    Unsupported,
    UnsupportedDtype,
)
from mpidist.nn import Adam, Linear, Module, Sequential
from mpidist.parallel.pipe.recompute import Recomputing
from mpidist.posting import Posting

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


def tanh():
    return [linear(), torch.nn.Tanh()]


def moving():
    """A buffer that is assigned anew, one that seldom moves, a list, an attribute that is late."""

    class Moving(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("scale", torch.ones(WIDTH))
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(dim=0)
            self.calls += 1
            if self.calls == 2:
                self.late = 0.5
            if self.calls % 3 == 2:
                self.scale *= 2
            self.seen.append(float(x.detach().mean()))
            x = x * self.scale.clone()
            return x + self.mean * self.calls + sum(self.seen) + getattr(self, "late", 0)

    return [linear(), Moving(), torch.nn.Tanh()]


BLOCKS = {
    "moving": (moving, moving),
    "normed": (normed, normed),
    "spectral": (spectral, spectral),
    "rectified": (partial(rectified, True), partial(rectified, False)),
    "doubled": (partial(doubled, True), partial(doubled, False)),
    "reentrant": (partial(checkpointed, True), tanh),
    "checkpointed": (partial(checkpointed, False), tanh),
    "transformed": (partial(transformed, True), partial(transformed, False)),
}


@needs_torch
@pytest.mark.parametrize("checkpoint", (False, True))
@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1", "zb-v"))
@pytest.mark.parametrize("name", BLOCKS)
def test_layers(name, schedule, checkpoint):
    """Gradients and buffers are those of the same microbatches without a pipeline."""
    block, plain = BLOCKS[name]
    later = 3 if schedule == "zb-v" else 1
    stages, others = made(tanh, *[block] * later), made(tanh, *[plain] * later)
    unsplit(others, 2)
    pipelined(stages, schedule, checkpoint, 2)
    same(stages, others)


@needs_torch
@pytest.mark.parametrize("checkpoint", (False, True))
@pytest.mark.parametrize("name", ("rectified", "doubled", "transformed"))
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
        (torch.nn.ModuleDict({"a": layer}), "stage is a ModuleDict, without a forward()"),
        (torch.nn.ParameterList([layer.weight]), "stage is a ParameterList, without a forward()"),
        (torch.nn.ModuleList([layer, torch.nn.ModuleList()]), "stage[1] is a ModuleList, without"),
        (torch.nn.ModuleList(), "stage=ModuleList(): allowed are a module"),
        (torch.nn.ReLU, "stage is the class ReLU, not an object as ReLU(…): allowed are a module"),
        (layer.weight, "is of Parameter: allowed are modules of PyTorch"),
    )

    def job(comm):
        for given, told in wrong:
            with pytest.raises(InvalidArgument, match=re.escape(told)):
                mpidist.Pipeline(given if comm.rank == 0 else layer, comm, 2)

    mpidist.run_simulated(2, job)


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
    from mpidist.parallel.pipe.plain_stage import PlainStage

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


@pytest.mark.parametrize("schedule", ("gpipe", "zb-h1", "zb-v"))
@pytest.mark.parametrize("checkpoint", (False, True))
def test_memory_that_a_layer_uses_again(schedule, checkpoint, monkeypatch):
    """It may: what is under way, and what another chunk of the rank has, is apart from it."""
    sent = []
    send = Posting.send

    def noting(self, data, peer, tag):
        sent.append((data, data.copy()))
        return send(self, data, peer, tag)

    monkeypatch.setattr(Posting, "send", noting)
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
    (Giving(lambda x: x.astype(object)), "rank 0, stage 0: an array of dtype object .* allowed"),
    (Giving(words), r"rank 0, stage 0: an array of dtype \|S4 between stages"),
    (Giving(lambda x: np.zeros(len(x), "f4,f4")), r"stage 0: an array of dtype \[\('f0', '<f4'"),
    (Giving(iter), "rank 0, stage 0: the output of a stage has a .*iterator in it: allowed"),
    (Only(lambda x: None), f"rank 0, stage 0: {NO_TENSOR}"),
    (Only(lambda x: "text"), f"rank 0, stage 0: {NO_TENSOR}"),
    (Only(numbers), "rank 0, stage 0: Only gave int64, of which there is no gradient, and has"),
    (Only(np.tanh), "no way back"),
)


@pytest.mark.parametrize("stage, told", WRONG)
def test_what_is_wrong_is_told_on_every_rank(stage, told):
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


def test_a_gradient_that_does_not_come_is_zero():
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


def test_all_ranks_learn_of_a_promise_that_was_not_kept():
    """More activations alive than the plan says, on one rank."""

    def job(comm):
        pipe = mpidist.Pipeline(Keeping(), comm, COUNT, "gpipe")
        x = np.ones((ROWS, WIDTH))
        if comm.rank == 1:
            plan = pipe._runner.plan
            pipe._runner.plan = type(plan)(plan.name, plan.placement, plan.steps, (0, 0))
        told = "4 activations were alive at a time and 0 still are, 0 and 0 are what gpipe promises"
        kind = ScheduleError if comm.rank == 1 else RankFailed
        with pytest.raises(kind, match=f"rank 1.*{told}"):
            pipe.step(x, x, plain_squares)
        with pytest.raises(CommunicatorBroken, match="pipeline step"):
            pipe.step(x, x, plain_squares)
        comm.barrier()

    mpidist.run_simulated(2, job)


def test_all_ranks_learn_of_a_parameter_without_a_gradient():
    """DDP finds it after the last action; ranks of other stages would wait in the next step."""

    class Idle(Linear):
        def forward(self, x):
            self._input = x
            return x

        def backward(self, grad):
            return grad

    def job(comm):
        grid = mpidist.Grid(comm, data=2)
        layer = Linear(WIDTH, WIDTH, dtype=np.float64)
        if grid.pipe_index == 0:
            layer = Sequential(layer, Idle(WIDTH, WIDTH, dtype=np.float64))
        model = mpidist.DDP(layer, grid.data, unused="error")
        pipe, x = mpidist.Pipeline(model, grid.pipe, COUNT), np.ones((ROWS, WIDTH))
        kind, told = InvalidArgument, "1.weight"
        if grid.pipe_index == 1:
            kind, told = (
                RankFailed,
                "rank 0 ended its part of the step with InvalidArgument.*1.weight",
            )
        with pytest.raises(kind, match=told):
            pipe.step(x, x, plain_squares)
        with pytest.raises(CommunicatorBroken, match="pipeline step"):
            pipe.step(x, x, plain_squares)

    mpidist.run_simulated(4, job)


def test_halves_are_counted_as_a_step_is(tmp_path):
    """Times, peaks and the trace of forward() and backward(), whatever was between and after."""

    def job(comm):
        pipe = mpidist.Pipeline(Keeping(), comm, COUNT, "gpipe")
        x = np.ones((ROWS, WIDTH))
        outputs = pipe.forward(x)
        with pytest.raises(InvalidArgument, match="before the first step"):
            pipe.trace(tmp_path / "run.json")
        assert pipe.stats().steps == 0
        pipe.backward(np.concatenate(outputs) if outputs else None)
        stats, trace = pipe.stats(), pipe.trace(tmp_path / "run.json")
        assert stats.steps == 1 and stats.seconds >= stats.span >= stats.busy > 0
        assert stats.bubble == pytest.approx(1 - stats.busy / stats.span)
        assert stats.peak_live == stats.predicted_live == COUNT and stats.peak_bytes > 0
        assert all(len(part) == 2 * COUNT for part in trace.measured.spans)
        pipe.forward(x)
        again = pipe.stats()
        assert (again.peak_live, again.steps) == (stats.peak_live, 1)
        assert pipe.trace(tmp_path / "run.json").measured.spans == trace.measured.spans

    mpidist.run_simulated(2, job)


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
