"""Modules: names, states, modes."""

import numpy as np
import pytest

from mpidist.nn import Identity, Linear, Module, ReLU, Sequential


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


def test_shared_parameter_is_listed_once():
    layer = Linear(3, 3)
    assert len(Sequential(layer, ReLU(), layer).parameters()) == 2


def test_module_without_definition():
    with pytest.raises(NotImplementedError):
        Module()(1)
    with pytest.raises(NotImplementedError):
        Module().backward(1)


def test_to_numpy_keeps_arrays():
    net = Sequential(Linear(5, 7), ReLU(), Linear(7, 4, bias=False))
    arrays = [p.data for p in net.parameters()]
    assert all(p.data is a for p, a in zip(net.to(np).parameters(), arrays, strict=True))
