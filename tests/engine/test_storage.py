"""Memory of programs on the host."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from mpidist.engine.storage import HostMemory


@pytest.mark.parametrize("dtype, divisor", [(np.float16, 2049), (bfloat16, 257)])
def test_divisor_that_the_dtype_has_not(dtype, divisor):
    """A mean over so many ranks: in half precision the divisor itself would be rounded."""
    x = np.array([1.0, 3.0, 250.0], dtype)
    mean = np.empty_like(x)
    HostMemory.divide(x, mean, divisor)()
    np.testing.assert_array_equal(mean, (x.astype(np.float32) / divisor).astype(dtype))
    wrong = (x.astype(np.float32) / float(dtype(divisor))).astype(dtype)
    assert (wrong != mean).any(), "this divisor tells nothing"
