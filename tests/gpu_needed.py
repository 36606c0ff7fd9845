"""Skips a whole file where there is no GPU, with the reason."""

import pytest

from mpidist.device.find import why_no_device


def cupy():
    """Give cupy, and have the file skipped where that or a GPU is missing."""
    found = pytest.importorskip("cupy", reason="needs a GPU")
    if why_no_device() is not None:
        pytest.skip("needs a GPU", allow_module_level=True)
    return found
