"""Which shapes and dtypes symmetric memory can have."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import InvalidArgument

_MOST_DIMENSIONS = 32 if np.lib.NumpyVersion(np.__version__) < "2.0.0" else 64


def check_shape(shape: Any, dtype: Any, rank: int) -> tuple[tuple[int, ...], np.dtype]:
    """Give shape and dtype of an array to be made, as numpy would have them.

    Raises
    ------
    InvalidArgument
        If there can be no such array, whatever the memory.
    """
    known = _known(dtype, rank)
    try:
        dims = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    except TypeError:
        dims = (shape,)
    if any(not isinstance(n, (int, np.integer)) or n < 0 for n in dims):
        raise InvalidArgument(f"rank {rank}: shape={shape!r}: whole numbers >= 0 are allowed")
    dims = tuple(map(int, dims))
    if known.subdtype is not None:
        known, more = known.subdtype
        dims += more
    if len(dims) > _MOST_DIMENSIONS:
        raise InvalidArgument(
            f"rank {rank}: shape has {len(dims)} dimensions, numpy allows {_MOST_DIMENSIONS}"
        )
    # Numpy counts so, also where one of them is 0.
    if math.prod(max(n, 1) for n in dims) * known.itemsize > np.iinfo(np.intp).max:
        raise InvalidArgument(
            f"rank {rank}: shape={shape!r} of {known}: allowed are {np.iinfo(np.intp).max} bytes"
        )
    return dims, known


def _known(dtype: Any, rank: int) -> np.dtype:
    try:
        known = np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgument(f"rank {rank}: dtype={dtype!r}: {error}") from None
    if known.hasobject:
        raise InvalidArgument(f"rank {rank}: dtype {known} cannot lie in shared memory")
    if not known.itemsize:
        raise InvalidArgument(f"rank {rank}: dtype={dtype!r} has no length: say how many bytes")
    return known
