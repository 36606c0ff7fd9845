"""Digests of arrays on a device, computed there at the speed of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..device.array import DeviceArray
from ..device.recognise import as_device_array, is_torch, of_torch
from ..shared_memory.digest import SUMS

_BYTES = 8 * SUMS  # of a digest


def digests(arrays: Sequence[Any]) -> np.ndarray:
    """Return the :func:`~mpidist.shared_memory.digest.digest` of each array, of shape (n, SUMS).

    The arrays are on the device of this thread, of any library; what is not contiguous is copied
    there.  The host waits for the streams on which they were written.
    """
    parts = [_bytes(x) for x in arrays]
    device = parts[0].device
    made = device.empty((len(parts), SUMS), np.dtype(np.uint64))
    sums = as_device_array(made, 0)
    host = device.pinned(sums.nbytes)
    host[:] = 0
    address, event = host.__array_interface__["data"][0], device.event()
    for stream in {part.stream for part in parts} - {sums.stream}:
        event.record(stream)
        event.block(sums.stream)
    device.copy(sums.pointer, address, sums.nbytes, sums.stream)
    for number, part in enumerate(parts):
        if part.nbytes:
            device.digest(part.pointer, part.nbytes, sums.pointer + number * _BYTES, sums.stream)
    device.copy(address, sums.pointer, sums.nbytes, sums.stream)
    device.synchronize(sums.stream)
    return host.view(np.uint64).reshape(-1, SUMS).copy()


def _bytes(x: Any) -> DeviceArray:
    """Return the elements of an array in order as bytes, which every dtype has."""
    if is_torch(x):
        flat = of_torch().bytes_of(x)
    else:
        flat = (x if x.flags.c_contiguous else x.copy()).reshape(-1).view(np.uint8)
    return as_device_array(flat, 0)
