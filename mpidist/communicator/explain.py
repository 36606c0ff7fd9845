"""What ``Communicator.explain`` asks about: a call of some size without arrays."""

from __future__ import annotations

import numpy as np

from ..calls.call import Call
from ..calls.prepare import Place, barrier
from ..errors import UnknownName
from ..operations import Op
from ..schedule.contract import COLLECTIVES


def example_call(place: Place, collective: str, nbytes: int, op: Op) -> Call:
    """Make a call of about `nbytes` of float32 whose arrays take no memory."""
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    if collective == "barrier":
        return barrier(place).call
    contract = COLLECTIVES[collective]
    each = nbytes // 4 if not contract.per_rank else nbytes // 4 // place.size
    data = np.broadcast_to(np.float32(0), (each if not contract.per_rank else each * place.size,))
    call = Call(collective, place.rank, place.size, 0, data.dtype, data, data)
    call.op = op if contract.reduces and not contract.idempotent else None
    if contract.per_rank:
        call.counts = call.out_counts = (each,) * place.size
    return call
