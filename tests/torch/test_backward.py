"""The halves of backward in PyTorch."""

import pytest

from tests.support.training_kits import NEEDS_TORCH, torch


def shared_weight(x, p):
    return [torch.tanh(torch.tanh(x @ p[0]) @ p[0]) @ p[1]]


def two_outputs(x, p):
    h = torch.tanh(x @ p[0])
    return [h @ p[1], h * p[2]]


def beside_the_input(x, p):
    return [x @ p[0] + p[2], (p[1] * 2).sum(dim=0)]


def twice_the_same(x, p):
    beside = (p[1] * 2).sum(dim=0)
    return [x @ p[0], beside, beside]


def normed(x, p):
    return [torch.nn.functional.layer_norm(x, (4,), p[2], p[2] * 2) @ (p[0] / p[0].norm())]


def no_parameters(x, p):
    return [x * 2]


GRAPHS = (
    shared_weight,
    two_outputs,
    beside_the_input,
    twice_the_same,
    normed,
    no_parameters,
)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
@pytest.mark.parametrize(
    "graph, inputs",
    # Without parameters and gradients of inputs there is nothing to be computed.
    [
        (graph, inputs)
        for graph in GRAPHS
        for inputs in (True, False)
        if inputs or graph is not no_parameters
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_halves(graph, inputs):
    """Together they add what one backward adds; the first gives all of the inputs' gradient."""
    from mpidist.torch.backward import Halves

    def make():
        torch.manual_seed(0)
        kinds = {"dtype": torch.float64, "requires_grad": True}
        p = [torch.randn(4, 4, **kinds), torch.randn(4, 4, **kinds), torch.randn(4, **kinds)]
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=inputs)
        roots = graph(x, p)
        return x, p, roots, [torch.randn_like(root) for root in roots]

    x, p, roots, grads = make()
    torch.autograd.backward(roots, grads)
    y, q, roots, grads = make()
    halves = Halves(roots, grads, [y] if inputs else [])
    halves.inputs()
    if inputs:
        assert torch.equal(x.grad, y.grad)
    halves.weights()
    for one, other in zip(p, q):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert torch.allclose(one.grad, other.grad, rtol=1e-14)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_the_second_half_computes_nothing_twice():
    """A node is run once in each half: what comes after it is not computed again."""
    from mpidist.torch.backward import Halves

    done = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            done.append(1)
            x, w = ctx.saved_tensors
            return grad @ w.T, x.T @ grad

    x = torch.randn(2, 3, requires_grad=True)
    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(5)]
    y = x
    for w in weights:
        y = Product.apply(y, w)
    halves = Halves([y], [torch.ones_like(y)], [x])
    halves.inputs()
    assert len(done) == 5 and all(w.grad is None for w in weights)
    halves.weights()
    assert len(done) == 10 and all(w.grad is not None for w in weights)


@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_split_under_no_grad():
    """Asked for the first time under no_grad or inference_mode, the answer is the same."""
    from mpidist.torch.backward import can_halve

    for off in (torch.no_grad, torch.inference_mode):
        can_halve.cache_clear()
        with off():
            assert can_halve()
