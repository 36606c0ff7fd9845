"""Optimizers against their formulas."""

import numpy as np
import pytest

from mpidist.errors import InvalidArgument
from mpidist.nn import SGD, Adam, Linear, Parameter


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


def test_state_of_a_parameter_that_does_not_exist():
    optimizer = SGD(Linear(2, 2).parameters(), 0.1, 0.9)
    with pytest.raises(InvalidArgument, match=r"\b7: .*\b2\b"):
        optimizer.load_state_dict({"state": {7: {"steps": 3}}})
