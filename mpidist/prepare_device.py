"""Preparing a call whose arrays are on a GPU: where it differs from host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .call import Call
from .device.array import DeviceArray
from .device.find import find_device
from .device.recognise import copy_of, describe, is_on_device, make_like
from .prepared import Place, Prepared

Told = tuple[tuple[int, ...], np.dtype, str]  # shape, dtype, and "array", "tensor" or "device"


def finish(
    call: Call, shape: tuple[int, ...], out: Any, place: Place, part: slice | None = None
) -> Prepared:
    """Provide the memory of the result, as for host memory; see there for `part`."""
    x = call.x
    if out is None:
        assert isinstance(x, DeviceArray)
        result = make_like(x, shape, call.dtype)
        call.out = result.reshape(-1)
        return Prepared(call, result)
    result = check_target(out, shape, call.dtype, place)
    call.out = result.reshape(-1)
    if isinstance(x, DeviceArray) and x.overlaps(call.out):
        longer, shorter = (call.out, x) if call.out.size >= x.size else (x, call.out)
        own = longer if part is None else longer.part(part.start, part.stop)
        if own.size != shorter.size or own.pointer != shorter.pointer:
            allowed = "the same array" if part is None else "exactly this rank's part"
            raise place.wrong(f"out overlaps x; in place is allowed only where they are {allowed}")
        call.in_place = True
    return Prepared(call, result)


def check_target(
    out: Any, shape: tuple[int, ...], dtype: np.dtype, place: Place, argument: str = "out"
) -> DeviceArray:
    """Check that a result of `shape` and `dtype` on a GPU can be stored in `out`."""
    if not is_on_device(out):
        raise place.wrong(
            f"{argument} is in host memory ({type(out).__module__}.{type(out).__name__}) and x on "
            "a GPU; use one kind"
        )
    found = describe(out, place.rank, argument)
    if found.dtype != dtype:
        raise place.wrong(f"{argument} has dtype {found.dtype}, the result has {dtype}")
    if found.shape != shape:
        raise place.wrong(f"{argument} has shape {found.shape}, the result has {shape}")
    if found.readonly:
        raise place.wrong(f"{argument} is read-only; it must be writable")
    return found


def broadcast_target(x: Any, out: Any, place: Place, root: int) -> Prepared | None:
    """Prepare broadcast where this rank receives, if into a GPU; else give None."""
    target, argument = (x, "x") if out is None else (out, "out")
    if not is_on_device(target):
        if is_on_device(x):
            check_target(target, (), np.dtype("u1"), place)  # says that the kinds differ
        return None
    if out is not None and x is not None and not is_on_device(x):
        raise place.wrong(
            f"out is on a GPU and x in host memory ({type(x).__name__}); use one kind"
        )
    result = describe(target, place.rank, argument)
    shape = result.shape if x is None or out is None else describe(x, place.rank).shape
    result = check_target(target, shape, result.dtype, place, argument)
    call = Call("broadcast", place.rank, place.size, root, result.dtype, None, result.reshape(-1))
    return Prepared(call, result)


def scatter_target(shape: tuple[int, ...], dtype: np.dtype, place: Place) -> Any:
    """Make the result of a scatter whose root has told that its array is on a GPU."""
    return find_device(place.rank).empty(shape, dtype)


def apart(call: Call, stream: int) -> Call:
    """Return an alltoall in place as one that is not: each part is both sent and overwritten.

    The copy of its input is queued on a stream.
    """
    if call.collective != "alltoall" or not call.in_place:
        return call
    return replace(call, x=copy_of(call.x, stream), in_place=False)
