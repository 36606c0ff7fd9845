"""The digest of an array on a device is that of the same bytes on the host."""

import ml_dtypes  # noqa: F401, so that numpy knows bfloat16
import numpy as np
import pytest

from mpidist.device.find import find_device, install_device
from mpidist.frameworks.base import digest as digest_of_any
from mpidist.gpu.digests import digests
from mpidist.shared_memory.digest import SUMS, digest
from tests.support.emulated import take_tensors_for_a_gpus
from tests.support.training_kits import NEEDS_TORCH

DTYPES = ("int8", "bool", "float16", "bfloat16", "float32", "float64", "complex128")
SIZES = 0, 1, 3, 8, 1001


def values(dtype: str, count: int) -> np.ndarray:
    raw = np.random.default_rng(count).integers(0, 256, count * np.dtype(dtype).itemsize)
    return (raw % 2 if dtype == "bool" else raw).astype(np.uint8).view(dtype)


def test_every_dtype_and_length(emulated_device):
    arrays = [values(dtype, count) for dtype in DTYPES for count in SIZES]
    found = digests([find_device().array(x) for x in arrays])
    assert found.shape == (len(arrays), SUMS) and found.dtype == np.uint64
    assert [tuple(each) for each in found.tolist()] == [digest(x) for x in arrays]
    assert digest_of_any(find_device().array(arrays[7])) == digest(arrays[7])


def test_what_is_not_contiguous(emulated_device):
    x = np.arange(35.0).reshape(5, 7)
    there = find_device().array(x)
    assert [tuple(each) for each in digests([there.T, there[1:], there]).tolist()] == [
        digest(x.T),
        digest(x[1:]),
        digest(x),
    ]


def test_array_that_is_still_computed(emulated_device):
    x = find_device().array(np.zeros(9))
    x += 1
    assert tuple(digests([x])[0].tolist()) == digest(np.ones(9))


def test_tensors(monkeypatch):
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    x = torch.arange(210, dtype=torch.float32).reshape(2, 3, 5, 7)
    tensors = [
        x,
        x.permute(3, 2, 1, 0),
        x.to(memory_format=torch.channels_last),
        x[0, 1, 2, 3],
        x[:0],
        x[:, 1:],
    ]
    tensors += [x.to(torch.bfloat16), x.to(torch.float8_e4m3fn), torch.nn.Parameter(x)]
    expected = [
        digest(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) for x in tensors
    ]
    take_tensors_for_a_gpus(monkeypatch)
    try:
        found = digests(tensors)
    finally:
        install_device(None)
    assert [tuple(each) for each in found.tolist()] == expected
