"""The mean over a batch from microbatches in which not everything counts."""

from functools import partial

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgument
from mpidist.nn import CrossEntropy, Linear
from mpidist.pipeline.loss import BatchLoss
from tests.support.pipeline_kits import mean
from tests.support.training_kits import NEEDS_TORCH, torch

needs_torch = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
ROWS, CLASSES = 9, 4


def weights(function, rows=12, count=None, reduction=None):
    target = np.arange(rows)
    loss = BatchLoss(function, target, 3, 2, count, reduction)
    return [loss.of(k, rows // 3).weight for k in range(3)]


@mean
def mean_of_all(y, target):
    return 1.0


def test_weights():
    assert weights(CrossEntropy()) == [1 / 3] * 3
    assert weights(CrossEntropy("sum")) == [1 / 12] * 3
    assert weights(CrossEntropy(), count=lambda t: (t > 3).sum()) == [0, 1 / 2, 1 / 2]
    assert weights(CrossEntropy("sum"), count=lambda t: (t > 3).sum()) == [1 / 8] * 3
    wrong = (
        (3, None, "rank 2: loss_fn=3: "),
        (partial(min, size_average=False), None, "size_average=False: .*reduction="),
        (partial(min, reduction="none"), None, "reduction='none': .*'mean'"),
        (mean_of_all, 3, "rank 2: count=3: "),
        (mean_of_all, lambda t: -1, "rank 2: count .*-1: .*>= 0"),
        (mean_of_all, lambda t: "all", "rank 2: count .*'all'"),
    )
    for function, count, told in wrong:
        with pytest.raises(InvalidArgument, match=told):
            weights(function, count=count)
    loss = BatchLoss(mean_of_all, np.ones(1), 1, 0, None).of(0, 1)
    with pytest.raises(InvalidArgument, match=r"no backward\(scale\)"):
        loss.loss_and_gradient(None)


@pytest.mark.parametrize("replicas", (1, 2))
def test_nothing_counts_in_a_microbatch(replicas):
    """Its loss, a mean over nothing, is not asked for; replicas weigh what counts in theirs."""

    @mean
    def loss(y, target):
        kept = target >= 0
        error = (y[:, 0] - target) * kept
        return float((error**2).sum() / kept.sum()), (2 * error / kept.sum())[:, None]

    x, target = np.random.default_rng(0).normal(size=(6, 3)), np.array([1.0, -1, -1, -1, 2, 3])

    def layer(k):
        return Linear(3, 1 if k else 3, bias=False, seed=k, dtype=np.float64)

    def job(comm):
        grid = mpidist.Grid(comm, data=replicas)
        stage = layer(grid.pipe_index)
        model = mpidist.DDP(stage, grid.data) if replicas > 1 else stage
        pipe = mpidist.Pipeline(model, grid.pipe, 3, "1f1b")
        rows = np.array_split(np.arange(6), replicas)[grid.data_index]
        found = pipe.step(x[rows], target[rows], loss, count=lambda t: (t >= 0).sum())
        return found, stage.weight.grad.copy(), grid.pipe_index

    y = x @ layer(0).weight.data.T
    expected, back = loss(y @ layer(1).weight.data.T, target)
    grads = ((back @ layer(1).weight.data).T @ x, back.T @ y)
    for value, grad, index in mpidist.run_simulated(2 * replicas, job):
        assert abs(value - expected) < 1e-12
        assert np.abs(grad - grads[index]).max() < 1e-12


def targets():
    """The first microbatch of three has no target that counts."""
    return torch.tensor([0, 0, 0, 1, 0, 2, 3, 1, 0])


def probabilities():
    return torch.softmax(torch.randn(ROWS, CLASSES, dtype=torch.float64), dim=1)


NAMES = (
    *("module", "weights", "smoothed", "nll", "partial", "function", "probabilities", "own"),
    "transformed",
)


def losses():
    F, weight = torch.nn.functional, torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)

    @mean
    def own(y, t):
        return F.cross_entropy(y, t, ignore_index=0)

    return {
        "module": (torch.nn.CrossEntropyLoss(ignore_index=0), None),
        "weights": (torch.nn.CrossEntropyLoss(weight, ignore_index=0), None),
        "smoothed": (torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1), None),
        "nll": (torch.nn.NLLLoss(weight, ignore_index=0), None),
        "partial": (partial(F.cross_entropy, ignore_index=0, weight=weight), None),
        "function": (F.cross_entropy, None),
        "probabilities": (torch.nn.CrossEntropyLoss(weight), None),
        "own": (own, lambda t: (t != 0).sum()),
        "transformed": (mean(lambda y, t: torch.func.vjp(torch.sin, y)[1](y)[0].mean()), None),
    }


@needs_torch
@pytest.mark.parametrize("name", NAMES)
def test_equals_unsplit(name):
    """Loss and gradients are those of the whole batch at once, whatever does not count."""
    function, count = losses()[name]
    torch.manual_seed(0)
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    target = probabilities() if name == "probabilities" else targets()
    if name == "function":
        target[target == 0] = -100

    def layers():
        torch.manual_seed(1)
        return [torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, CLASSES).double()]

    whole, stages = layers(), layers()
    loss = function(whole[1](whole[0](x)), target)
    loss.backward()
    for checkpoint in (False, True)[: 2 - (name == "transformed")]:

        def job(comm, checkpoint=checkpoint):
            pipe = mpidist.Pipeline(stages[comm.rank], comm, 3, checkpoint=checkpoint)
            return pipe.step(x, target, function, count)

        for layer in stages:
            layer.zero_grad()
        found = mpidist.run_simulated(2, job)
        assert abs(found[0] - loss.item()) < 1e-12
        for one, other in zip(stages, whole):
            for p, q in zip(one.parameters(), other.parameters()):
                assert (p.grad - q.grad).abs().max() < 1e-12


def test_the_reduction_is_declared_or_asked_for():
    """By an attribute, a partial, a parameter's default or the argument; never guessed."""

    def own(y, t):
        return 1.0

    def by_default(y, t, reduction="sum"):
        return 1.0

    assert weights(own, reduction="mean") == [1 / 3] * 3
    assert weights(own, reduction="sum") == weights(by_default) == [1 / 12] * 3
    assert weights(partial(by_default, reduction="mean"), reduction="mean") == [1 / 3] * 3
    assert weights(own, count=lambda t: (t > 3).sum(), reduction="mean") == [0, 1 / 2, 1 / 2]
    own.reduction = "sum"
    assert weights(partial(own)) == [1 / 12] * 3
    ignoring = CrossEntropy()
    ignoring.ignore_index = 0
    assert weights(ignoring, count=len) == [1 / 3] * 3
    for function, reduction, told in (
        (lambda y, t: 1.0, None, "loss_fn=.*mean.*sum.*reduction='mean'"),
        (partial(min), None, "loss_fn=.*reduction='mean'"),
        (own, "mean", "reduction='mean'.*loss_fn .*reduction='sum'"),
        (own, "none", "reduction='none': .*'mean'.*'sum'"),
        (ignoring, None, r"\(ignore_index=0\).*\bcount="),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 2: .*{told}"):
            weights(function, reduction=reduction)


@needs_torch
def test_the_reduction_of_functions_of_torch():
    """Each is known by its signature; ignored targets do not count."""
    F, target = torch.nn.functional, targets()
    y = torch.randn(ROWS, CLASSES, requires_grad=True)
    summed = BatchLoss(partial(F.mse_loss, reduction="sum"), target, 3, 0)
    assert summed.of(0, 3).weight == 1 / ROWS
    assert BatchLoss(F.mse_loss, target, 3, 0).of(0, 3).weight == 1 / 3
    assert BatchLoss(F.cross_entropy, target, 3, 0).total == ROWS
    assert BatchLoss(partial(F.cross_entropy, ignore_index=0), target, 3, 0).counts == [0, 2, 2]
    with pytest.raises(InvalidArgument, match="rank 3: loss_fn=.*reduction="):
        BatchLoss(lambda y, t: F.cross_entropy(y, t, ignore_index=0), target, 1, 3)
    own = BatchLoss(lambda y, t: F.cross_entropy(y, t), target, 1, 3, None, "mean")
    assert own.of(0, ROWS).tensor(y).item() == pytest.approx(F.cross_entropy(y, target).item())


@needs_torch
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_compiled_losses():
    """They weigh what their targets do, or are refused."""
    F, weight = torch.nn.functional, torch.tensor([0.5, 1.0, 2.0, 4.0])
    compiled = partial(torch.compile, backend="eager")
    torch.manual_seed(0)
    y, target = torch.randn(ROWS, CLASSES, requires_grad=True), targets()

    def weighed(function, count=None, reduction=None):
        loss = BatchLoss(function, target, 3, 3, count, reduction)
        parts = [loss.of(k, 3).tensor(y[3 * k : 3 * k + 3]) for k in range(3)]
        return sum(parts).item()

    module = compiled(torch.nn.CrossEntropyLoss(weight, ignore_index=0))
    for function, count, reduction in (
        (module, lambda t: weight[t[t != 0]].sum(), None),
        (compiled(F.cross_entropy), None, None),
        (partial(compiled(F.nll_loss), weight=weight, ignore_index=0), None, None),
        (compiled(lambda y, t: F.cross_entropy(y, t)), None, "mean"),
        (
            compiled(lambda y, t: F.cross_entropy(y, t, ignore_index=0)),
            lambda t: (t != 0).sum(),
            "mean",
        ),
    ):
        found = weighed(function, count, reduction)
        assert found == pytest.approx(function(y, target).item(), rel=1e-5)
    scripted = torch.jit.script(torch.nn.CrossEntropyLoss(ignore_index=0))
    for function, told in (
        (compiled(lambda y, t: F.cross_entropy(y, t, ignore_index=0)), "reduction="),
        (module, "ignore_index="),
        (scripted, "ignore_index=|reduction="),
    ):
        with pytest.raises(InvalidArgument, match=f"rank 3: loss_fn.*{told}"):
            weighed(function)


@needs_torch
def test_a_loss_without_a_graph_is_refused():
    y, target = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    loss = BatchLoss(lambda y, t: ((y.detach() - t) ** 2).mean(), target, 1, 1, None, "mean")
    with pytest.raises(InvalidArgument, match=r"rank 1: loss_fn .*\bgraph\b.*forward\(\)"):
        loss.of(0, 3).tensor(y)

    def step(comm):
        stage = torch.nn.Linear(2, 2)
        pipe = mpidist.Pipeline(stage, comm, 1)
        with torch.no_grad() if comm.rank == 0 else torch.inference_mode():
            told = rf"rank {comm.rank}: step\(\) within torch.no_grad\(\) or inference_mode\(\)"
            with pytest.raises(InvalidArgument, match=told):
                pipe.step(y, target, torch.nn.functional.mse_loss)
        pipe.step(y.detach(), target, torch.nn.functional.mse_loss)
        assert stage.weight.grad is not None

    mpidist.run_simulated(2, step)


class Doubled:
    """Gives its input and twice that; keeps nothing."""

    saved = ()

    def forward(self, x):
        return x, 2 * x

    def backward(self, grads):
        return grads[0] + 2 * grads[1]

    def parameters(self):
        return []


def test_a_loss_of_several_outputs_without_autograd():
    """Its gradient is made like the outputs."""
    x = np.arange(12.0).reshape(6, 2)

    @mean
    def sums(output, target):
        rows = len(target)
        loss = (output[0].sum() + output[1].sum()) / rows
        return loss, tuple(np.ones_like(y) / rows for y in output)

    def job(comm):
        stage = Linear(2, 2, bias=False) if comm.rank == 0 else Doubled()
        if comm.rank == 0:
            stage.weight.data[:] = np.eye(2)
        loss = mpidist.Pipeline(stage, comm, 3).step(x, x, sums)
        assert loss == pytest.approx(3 * x.sum() / 6)
        if comm.rank == 0:  # d/dw of the mean of 3 (x w)
            assert np.abs(stage.weight.grad).sum() == pytest.approx(3 * 2 * x.sum() / 6)

    mpidist.run_simulated(2, job)
