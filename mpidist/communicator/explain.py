"""An example call of a given size without arrays of its own, for ``Communicator.explain``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calls.call import Call
from ..calls.prepare import Caller, check_partial, prepare
from ..device.array import DeviceArray
from ..device.base import Device
from ..errors import UnknownName
from ..operations import Op
from ..schedule.contract import COLLECTIVES


def example_call(
    place: Caller, collective: str, nbytes: int, op: Op, device: Device | None = None
) -> Call:
    """Return a call of about `nbytes` of float32, on a device if given; its arrays have no memory.

    The barrier has no arrays: its call is the same with and without a device.
    """
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    if collective == "barrier":
        return prepare("barrier", place).call
    contract = COLLECTIVES[collective]
    parts = place.size if contract.per_rank else 1
    each = nbytes // 4 // parts
    dtype, counts = np.dtype(np.float32), (each,) * parts if contract.per_rank else ()

    def array(blocks: range) -> Any:
        shape = (each * len(blocks),)
        if not blocks:
            return None
        if device is not None:
            return DeviceArray(0, shape, dtype, 0, device, None, device.empty)
        return np.broadcast_to(dtype.type(0), shape)

    where = place.rank, place.size, 0, parts
    x, out = array(contract.input_blocks(*where)), array(contract.output_blocks(*where))
    if not contract.averages and contract.reduces:
        check_partial(collective, op, place)
    what = op if contract.reduces else None
    return Call(collective, place.rank, place.size, 0, dtype, x, out, what, counts, counts)
