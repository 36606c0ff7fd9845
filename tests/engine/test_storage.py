"""Memory of programs on the host."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from mpidist.engine.storage import HostMemory, Storage
from mpidist.errors import ScheduleError
from mpidist.schedule import COLLECTIVES
from mpidist.schedule.unrolled import Lengths


@pytest.mark.parametrize("dtype, divisor", [(np.float16, 2049), (bfloat16, 257)])
def test_divisor_that_the_dtype_has_not(dtype, divisor):
    """A mean over so many ranks: in half precision the divisor itself would be rounded."""
    x = np.array([1.0, 3.0, 250.0], dtype)
    mean = np.empty_like(x)
    HostMemory.divide(x, mean, divisor)()
    np.testing.assert_array_equal(mean, (x.astype(np.float32) / divisor).astype(dtype))
    wrong = (x.astype(np.float32) / float(dtype(divisor))).astype(dtype)
    assert (wrong != mean).any(), "this divisor tells nothing"


def test_storage_has_more_blocks_of_tmp_than_the_data():
    """A schedule whose blocks have one length may keep several copies of each."""
    x = np.zeros(6, np.float32)
    lengths = Lengths.even(6, 3, 1)
    storage = Storage(COLLECTIVES["allreduce"], (0, 2, 0), lengths, x, x, HostMemory(x.dtype))
    storage.allocate([("tmp", 3), ("tmp", 8)])
    pieces = [storage.write(("tmp", block)) for block in (3, 8)]
    assert [stop - start for _, start, stop in pieces] == [2, 2]
    assert storage.scratch_elements == 4
    with pytest.raises(ScheduleError, match="block 3: 'out' has no block 3"):
        storage.allocate([("out", 3)])
