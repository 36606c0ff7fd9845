"""The layers: gradients against finite differences, optimizers against their formulas."""

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.nn import (
    SGD,
    Adam,
    CrossEntropy,
    Identity,
    Linear,
    Module,
    Parameter,
    ReLU,
    Sequential,
)

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


def test_cross_entropy_is_stable():
    loss = CrossEntropy()
    scores = np.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]])
    assert loss(scores, np.array([0, 1])) == 0.0
    assert loss(scores, np.array([1, 0])) == 2e4
    assert np.isfinite(loss.backward()).all()
    assert loss(np.zeros((3, 10)), np.zeros(3, int)) == pytest.approx(np.log(10))


def test_identity_module_train_eval_toggles_state():
    identity = Identity()
    assert identity.training
    identity.eval()
    assert not identity.training
    identity.train()
    assert identity.training
    x = np.arange(3.0)
    assert identity(x) is x and identity.backward(x) is x
    assert identity.parameters() == []


def test_train_eval_reach_everything_inside():
    net = Sequential(Linear(2, 2), Sequential(ReLU()))
    assert net.eval() is net
    assert [m.training for m in net.modules()] == [False] * 4
    net.train()
    assert all(m.training for m in net.modules())


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


def test_shared_parameter_is_listed_once():
    layer = Linear(3, 3)
    assert len(Sequential(layer, ReLU(), layer).parameters()) == 2


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


def test_to_numpy_keeps_arrays():
    net = model()
    arrays = [p.data for p in net.parameters()]
    assert all(p.data is a for p, a in zip(net.to(np).parameters(), arrays, strict=True))


def test_module_without_definition():
    with pytest.raises(NotImplementedError):
        Module()(1)
    with pytest.raises(NotImplementedError):
        Module().backward(1)


def test_sgd():
    p = Parameter(np.array([1.0, 2.0]))
    optimizer = SGD([p], learning_rate=0.1, momentum=0.5, weight_decay=0.01)
    expected, velocity, data = p.data.copy(), 0.0, p.data
    for step in range(4):
        p.grad = np.array([1.0, -2.0]) * step
        grad = p.grad + 0.01 * expected
        velocity = grad if step == 0 else 0.5 * velocity + grad
        expected = expected - 0.1 * velocity
        optimizer.step()
        np.testing.assert_allclose(p.data, expected, rtol=1e-14)
    assert p.data is data
    optimizer.zero_grad()
    assert p.grad is None
    optimizer.step()
    np.testing.assert_allclose(p.data, expected, rtol=1e-14)


def test_adam():
    p = Parameter(np.array([1.0, 2.0], np.float32))
    optimizer = Adam([p], learning_rate=0.1, weight_decay=0.01)
    x, m, v = p.data.astype(float), 0.0, 0.0
    for t in range(1, 5):
        p.grad = np.array([1.0, -2.0], np.float32) * t
        g = p.grad + 0.01 * x
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = x - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        optimizer.step()
        np.testing.assert_allclose(p.data, x, rtol=1e-5)
    assert p.data.dtype == np.float32


def test_optimizers_leave_the_gradient_alone():
    for make in (SGD, Adam):
        p = Parameter(np.ones(3), np.ones(3))
        make([p], weight_decay=0.1).step()
        np.testing.assert_array_equal(p.grad, 1.0)


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


def test_no_samples_have_no_mean():
    scores, labels = np.zeros((0, 3)), np.zeros(0, int)
    with pytest.raises(InvalidArgument, match=r"labels=\[\]: .*reduction='sum'"):
        CrossEntropy()(scores, labels)
    loss = CrossEntropy("sum")
    assert loss(scores, labels) == 0 and loss.backward().shape == (0, 3)


def test_state_of_a_parameter_that_does_not_exist():
    optimizer = SGD(Linear(2, 2).parameters(), 0.1, 0.9)
    with pytest.raises(InvalidArgument, match=r"\b7: .*\b2\b"):
        optimizer.load_state_dict({"state": {7: {"steps": 3}}})
