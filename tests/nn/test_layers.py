"""The layers: gradients against finite differences, optimizers against their formulas."""

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.nn import SGD, Adam, CrossEntropy, Identity, Linear, ReLU, Sequential

RANDOM = np.random.default_rng(5)


def model(dtype=np.float64, seed=1):
    random = np.random.default_rng(seed)
    return Sequential(
        Linear(5, 7, seed=random, dtype=dtype),
        ReLU(),
        Identity(),
        Linear(7, 4, seed=random, dtype=dtype, bias=False),
    )


def difference(f, array, step=1e-6):
    """Give the gradient of f() with respect to `array` by central differences."""
    grad = np.empty_like(array)
    for index in np.ndindex(array.shape):
        value = array[index]
        array[index] = value + step
        above = f()
        array[index] = value - step
        grad[index] = (above - f()) / (2 * step)
        array[index] = value
    return grad


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_gradients_against_finite_differences(reduction, scale):
    net, loss = model(), CrossEntropy(reduction)
    x, labels = RANDOM.normal(size=(6, 5)), RANDOM.integers(0, 4, 6)

    def value():
        return scale * loss(net(x), labels)

    value()
    input_grad = net.backward(loss.backward(scale))
    np.testing.assert_allclose(input_grad, difference(value, x), atol=1e-8)
    for name, p in net.named_parameters():
        np.testing.assert_allclose(p.grad, difference(value, p.data), atol=1e-8, err_msg=name)


def test_backward_accumulates():
    net, loss = model(), CrossEntropy()
    x, labels = RANDOM.normal(size=(6, 5)), RANDOM.integers(0, 4, 6)
    loss(net(x), labels)
    net.backward(loss.backward())
    once = [p.grad.copy() for p in net.parameters()]
    net.backward(loss.backward())
    for p, grad in zip(net.parameters(), once, strict=True):
        np.testing.assert_array_equal(p.grad, 2 * grad)
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_empty_batch_has_zero_gradients():
    net, loss = model(), CrossEntropy("sum")
    assert loss(net(np.empty((0, 5))), np.empty(0, int)) == 0
    net.backward(loss.backward())
    assert all((p.grad == 0).all() and p.grad.shape == p.data.shape for p in net.parameters())


def test_names_and_shapes():
    net = model(np.float32)
    assert [(n, p.data.shape) for n, p in net.named_parameters()] == [
        ("0.weight", (7, 5)),
        ("0.bias", (7,)),
        ("3.weight", (4, 7)),
    ]
    assert {p.data.dtype for p in net.parameters()} == {np.dtype(np.float32)}
    assert net(np.zeros((2, 5), np.float32)).dtype == np.float32
    assert "shape=(7, 5)" in repr(net.parameters()[0])


def test_seed_gives_the_same_values():
    first, again, other = model(seed=3), model(seed=3), model(seed=4)
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(a.data, b.data)
        assert not np.array_equal(a.data, c.data)


def test_state_is_loaded_in_place():
    net, other = model(), model(seed=9)
    arrays = [p.data for p in net.parameters()]
    net.load_state_dict(other.state_dict())
    for p, array, q in zip(net.parameters(), arrays, other.parameters(), strict=True):
        assert p.data is array
        np.testing.assert_array_equal(p.data, q.data)
        assert not np.shares_memory(p.data, q.data)


def test_wrong_state_says_what_is_wrong():
    state = model().state_dict()
    state["0.bias"] = np.zeros(3)
    state["extra"] = np.zeros(2)
    with pytest.raises(InvalidArgument, match=r"0.bias: \(3,\); extra: \(2,\).*0.bias: \(7,\)"):
        model().load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (SGD, {"learning_rate": -1}),
        (SGD, {"momentum": 1.0}),
        (SGD, {"weight_decay": float("nan")}),
        (Adam, {"betas": (0.9, 1.0)}),
        (CrossEntropy, {"reduction": "max"}),
    ],
)
def test_refused_values(make, values):
    (name,) = values
    with pytest.raises(InvalidArgument, match=name):
        make(**values) if make is CrossEntropy else make([], **values)


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.5, momentum=0.9), lambda p: Adam(p, 0.02)])
def test_training_learns(make):
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 5)).astype(np.float32)
    labels = (x @ random.normal(size=(5, 4))).argmax(axis=1)
    net, loss = model(np.float32), CrossEntropy()
    optimizer = make(net.parameters())
    for _ in range(200):
        value = loss(net(x), labels)
        net.zero_grad()
        net.backward(loss.backward())
        optimizer.step()
    assert value < 0.1
