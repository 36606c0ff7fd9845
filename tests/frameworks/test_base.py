"""Adapters for model libraries: frameworks.base.ADAPTERS and the functions that read it."""

import pickle

import numpy as np
import pytest

from mpidist.frameworks.base import ADAPTERS, adapter, digest, dtype_name, framework_of, library
from mpidist.nn import SGD, Adam
from tests.support.training_kits import NEEDS_TORCH

CONTENTS = {
    "framework": "FRAMEWORK",
    "stage": "stage",
    "loss": "known",
    "loader": "shard_loader",
}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("purpose", CONTENTS)
def test_adapter(name, purpose):
    if name is not None:
        pytest.importorskip(name, reason=NEEDS_TORCH)
    module = adapter(name, purpose)
    assert (module is None) == (purpose not in ADAPTERS[name])
    assert module is None or hasattr(module, CONTENTS[purpose])


def test_framework_of_numpy():
    x = np.arange(3.0)
    assert library(x) is None
    assert framework_of(x).as_array(x) is x and framework_of(x).from_array(x) is x


def test_framework_of_torch():
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    x = torch.arange(3.0)
    assert library(x) == "torch" == library(torch.nn.Linear(1, 1))
    array = framework_of(x).as_array(x)
    array[1] = 7
    assert x.tolist() == [0, 7, 2]
    assert framework_of(x).from_array(array).data_ptr() == x.data_ptr()
    assert digest(x) == digest(array)


def updated(optimizer, groups, grad):
    """Make three steps on parameters of one array each, and return all elements."""
    import torch

    parameters = []
    for data, gradient in groups:
        parameters.append(torch.nn.Parameter(data.clone()))
        parameters[-1].grad = gradient.clone()
    optimize = optimizer(parameters, lr=0.1)
    for _ in range(3):
        optimize.step()
        for p in parameters:
            p.grad *= grad
    return torch.cat([p.detach().reshape(-1) for p in parameters])


def test_is_elementwise():
    """Each known optimizer of PyTorch updates a matrix as it does two flat pieces of it."""
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    from mpidist.torch.framework import ELEMENTWISE

    framework = framework_of(torch.ones(1))
    data, grad = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 12)
    matrix = [(data.reshape(4, 3), grad.reshape(4, 3))]
    pieces = [(data[:5], grad[:5]), (data[5:], grad[5:])]
    for name in ELEMENTWISE:
        optimizer = getattr(torch.optim, name)
        assert framework.is_elementwise(optimizer)
        torch.testing.assert_close(updated(optimizer, matrix, 0.5), updated(optimizer, pieces, 0.5))
    assert not framework.is_elementwise(torch.optim.LBFGS)


def test_is_elementwise_of_nn():
    framework = framework_of(np.ones(1))
    assert framework.is_elementwise(SGD) and framework.is_elementwise(Adam)
    assert not framework.is_elementwise(type("Mine", (SGD,), {}))


def test_dtype_name_of_an_unpickled_dtype():
    """A dtype that was unpickled does not count as built in."""
    for dtype in ("complex128", "float32", "int8"):
        there = pickle.loads(pickle.dumps(np.dtype(dtype)))
        assert dtype_name(there) == dtype_name(np.dtype(dtype)) == np.dtype(dtype).str
