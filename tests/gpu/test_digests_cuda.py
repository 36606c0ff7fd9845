"""Digests of arrays on a real GPU: make test-gpu; skipped where there is none."""

import numpy as np

from mpidist.gpu.digests import digests
from mpidist.shared_memory.digest import digest
from tests.support.gpu_kits import NEEDS_GPU, cupy, torch_for_gpu

pytestmark = NEEDS_GPU


def test_every_length_and_alignment():
    """The kernel reads words of 8, 4, 2 or 1 bytes, and has more words than threads, or fewer."""
    host = np.random.default_rng(1).integers(0, 256, (1 << 20) + 24, dtype=np.uint8)
    there = cupy.asarray(host)
    parts = [
        slice(start, start + length)
        for start in (0, 1, 2, 4, 8)
        for length in (0, 1, 2, 4, 7, 8, 12, 100, 4096, 1 << 20, (1 << 20) - 2)
    ]
    found = digests([there[part] for part in parts])
    assert [tuple(each) for each in found.tolist()] == [digest(host[part]) for part in parts]


def test_tensors():
    torch = torch_for_gpu()
    x = torch.randn(3, 64, 5, 5, device="cuda")
    tensors = [
        x,
        x.to(memory_format=torch.channels_last),
        x.permute(3, 2, 1, 0),
        x.bfloat16(),
        x.double()[:, 1:],
    ]
    found = digests(tensors)
    expected = [digest(x.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()) for x in tensors]
    assert [tuple(each) for each in found.tolist()] == expected
