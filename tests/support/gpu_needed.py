"""For every test_*_cuda.py: without a GPU each test is skipped, with the reason.

The files are imported all the same, so that a wrong name in them is seen anywhere.
"""

import os

import pytest

from mpidist.device.find import why_no_device

WHY_NOT = why_no_device()
MARK = pytest.mark.skipif(WHY_NOT is not None, reason=f"needs a GPU: {WHY_NOT}")

if WHY_NOT is None:
    import cupy
elif os.environ.get("MPIDIST_TEST_GPU") == "needed":  # by `make test-gpu`, which is to test one
    raise RuntimeError(f"no GPU can be used: {WHY_NOT}")
else:
    cupy = None


def torch():
    """Give PyTorch; the test is skipped without it, or if it sees no GPU."""
    found = pytest.importorskip("torch", reason="needs PyTorch")
    if not found.cuda.is_available():
        pytest.skip(f"needs PyTorch for this GPU: {found.__version__} sees none")
    return found
