"""Python objects over collectives, and calls that carry no user array."""

from __future__ import annotations

import pickle
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from .call import Call
from .errors import InvalidArgument, UnknownName
from .messages import as_bytes
from .operations import Op
from .prepare import Place, Prepared
from .schedule.contract import COLLECTIVES

if TYPE_CHECKING:
    from .communicator import Communicator


def broadcast_object(comm: Communicator, value: Any, root: int, algorithm: str = "auto") -> Any:
    """Broadcast the length of the pickled object, then its bytes; all raise if it has none."""
    data, error = _pickled(value) if comm.rank == root else (_NOTHING, None)
    told = np.array([-1 if error else data.size])
    length = int(comm.broadcast(told, root, algorithm=algorithm)[0])
    if length < 0:
        raise error or InvalidArgument(f"rank {root}: its object cannot be pickled")
    if comm.rank != root:
        data = np.empty(length, np.uint8)
    comm.broadcast(data, root, algorithm=algorithm)
    return value if comm.rank == root else pickle.loads(data.data)


def allgather_object(comm: Communicator, value: Any, algorithm: str = "auto") -> list[Any]:
    """Gather the lengths of the pickled objects, then their bytes; all raise if one has none."""
    data, error = _pickled(value)
    told = np.array([-1 if error else data.size])
    counts = comm.allgather(told, algorithm=algorithm).tolist()
    if min(counts) < 0:
        ranks = ", ".join(str(rank) for rank, count in enumerate(counts) if count < 0)
        raise error or InvalidArgument(f"the object of rank {ranks} cannot be pickled")
    joined = comm.allgather(data, algorithm=algorithm, counts=counts)
    starts = [0, *accumulate(counts)]
    return [pickle.loads(joined[a:b].data) for a, b in zip(starts, starts[1:])]


_NOTHING = np.empty(0, np.uint8)


def _pickled(value: Any) -> tuple[np.ndarray, InvalidArgument | None]:
    """Pickle an object, or give the error: the other ranks must hear of it, or they would wait."""
    try:
        return as_bytes(value), None
    except InvalidArgument as error:
        return _NOTHING, error


def barrier_call(place: Place) -> Prepared:
    """Prepare a barrier: it has no data."""
    nothing = np.empty(0, np.uint8)
    call = Call("barrier", place.rank, place.size, 0, nothing.dtype, nothing, np.empty(0, np.uint8))
    return Prepared(call, None)


def example_call(place: Place, collective: str, nbytes: int, op: Op) -> Call:
    """Make a call of about `nbytes` of float32 whose arrays take no memory."""
    if collective not in COLLECTIVES:
        raise UnknownName("collective", collective, COLLECTIVES)
    if collective == "barrier":
        return barrier_call(place).call
    contract = COLLECTIVES[collective]
    each = nbytes // 4 if not contract.per_rank else nbytes // 4 // place.size
    data = np.broadcast_to(np.float32(0), (each if not contract.per_rank else each * place.size,))
    call = Call(collective, place.rank, place.size, 0, data.dtype, data, data)
    call.op = op if contract.reduces and not contract.idempotent else None
    if contract.per_rank:
        call.counts = call.out_counts = (each,) * place.size
    return call
