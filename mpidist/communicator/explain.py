"""An example call of a given size without arrays, for ``Communicator.explain``."""

from __future__ import annotations

import numpy as np

from ..calls.call import Call
from ..calls.prepare import Caller, check_no_mean, prepare
from ..errors import UnknownName
from ..operations import Op
from ..schedule.contract import COLLECTIVES


def example_call(place: Caller, collective: str, nbytes: int, op: Op) -> Call:
    """Return a call of about `nbytes` of float32 with arrays that take no memory."""
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    if collective == "barrier":
        return prepare("barrier", place).call
    contract = COLLECTIVES[collective]
    parts = place.size if contract.per_rank else 1
    each = nbytes // 4 // parts
    data = np.broadcast_to(np.float32(0), (each * parts,))
    counts = (each,) * parts if contract.per_rank else ()
    if not contract.averages and contract.reduces:
        check_no_mean(collective, op, place)
    what = op if contract.reduces else None
    return Call(collective, place.rank, place.size, 0, data.dtype, data, data, what, counts, counts)
