"""Buckets on a GPU: where their memory is, and by which algorithm they are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..device.recognise import describe
from ..errors import Unsupported
from .framework import Framework
from .pins import choose_algorithms

if TYPE_CHECKING:
    from .bucket import Bucket


def allocate_on_device(comm: Any, count: int, framework: Framework, p: Any) -> Any:
    """Make a flat array of zeros in symmetric memory of the GPUs; None if it is of no use there.

    Collective.  The memory is taken as bytes: libraries do not have all dtypes of each other.
    """
    values = framework.values(p)
    if not comm._gpu.sums_in_place(describe(values, comm.rank).dtype):
        return None
    nbytes = count * values.itemsize
    try:
        return framework.on_device(comm.empty(nbytes, "uint8", device="cuda"), p)
    except Unsupported:
        return None


def choose_on_device(comm: Any, adviser: Any, flat: Any, asked: str, collective: str) -> str:
    """Choose the algorithm of an array on a GPU, once and for all ranks; collective.

    What the GPUs themselves serve gives the same bits every time; what goes through the host goes
    in chunks, and is chosen as one of them would be.
    """
    gpu = comm._gpu
    if asked != "auto" or gpu.serves_alone(describe(flat, comm.rank), collective):
        return asked
    (name,) = choose_algorithms(
        adviser, [min(int(flat.nbytes), gpu.chunk_bytes)], asked, False, collective
    )
    return name


def release(bucket: Bucket) -> None:
    """Give the symmetric memory of a bucket back that is no more; collective."""
    if bucket.lane is None or bucket.comm.size == 1:
        return
    gpu = bucket.comm._gpu
    if gpu.holds(bucket.flat):
        bucket.comm.free(bucket.flat)


def real(dtype: Any) -> bool:
    """Tell whether numbers of a dtype, of numpy or torch, have a mean of the same dtype."""
    if isinstance(dtype, np.dtype):
        return dtype.kind in "fc" or dtype.name == "bfloat16"
    return bool(dtype.is_floating_point or dtype.is_complex)
