"""Adapters for model libraries: frameworks.base.ADAPTERS and the functions that read it."""

import numpy as np
import pytest

from mpidist.frameworks.base import ADAPTERS, adapter, digest, framework_of, library

CONTENTS = {
    "framework": "FRAMEWORK",
    "stage": "stage",
    "state": "untouched",
    "loss": "known",
    "loader": "shard_loader",
}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("purpose", CONTENTS)
def test_adapter(name, purpose):
    if name is not None:
        pytest.importorskip(name)
    module = adapter(name, purpose)
    assert (module is None) == (purpose not in ADAPTERS[name])
    assert module is None or hasattr(module, CONTENTS[purpose])


def test_framework_of_numpy():
    x = np.arange(3.0)
    assert library(x) is None
    assert framework_of(x).as_array(x) is x and framework_of(x).from_array(x) is x


def test_framework_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.arange(3.0)
    assert library(x) == "torch" == library(torch.nn.Linear(1, 1))
    array = framework_of(x).as_array(x)
    array[1] = 7
    assert x.tolist() == [0, 7, 2]
    assert framework_of(x).from_array(array).data_ptr() == x.data_ptr()
    assert digest(x) == digest(array)
