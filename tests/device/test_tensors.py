"""Tensors of PyTorch as arrays on the same memory, and back."""

import numpy as np
import pytest

from tests.support.training_kits import NEEDS_TORCH, torch

pytestmark = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
if torch is not None:
    from mpidist.device import tensors

NAMES = ["float32", "bool", "uint8", "complex64", "float16", "bfloat16", "float8_e4m3fn"]


@pytest.mark.parametrize("name", NAMES)
def test_words_as_tensor_returns_the_same_memory(name):
    x = torch.tensor([0.0, 1.0, 2.0]).to(getattr(torch, name))
    words = tensors.words(x)
    own = name not in ("bfloat16", "float8_e4m3fn")
    assert words.dtype == np.dtype(name if own else f"i{x.element_size()}")
    back = tensors.as_tensor(words, x.dtype)
    assert back.dtype is x.dtype and back.data_ptr() == x.data_ptr() == words.ctypes.data
    words[:] = 0
    assert not x.to(torch.bool).any()


@pytest.mark.parametrize("name", NAMES)
def test_as_array_as_tensor_returns_the_same_memory(name):
    """The array has the dtype, so the tensor needs no other word of it."""
    x = torch.tensor([0.0, 1.0, 2.0]).to(getattr(torch, name))
    array = tensors.as_array(x)
    back = tensors.as_tensor(array)
    assert array.dtype.name == name and back.dtype is x.dtype
    assert back.data_ptr() == x.data_ptr() and back.shape == x.shape
