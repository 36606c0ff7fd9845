"""Who is measured: the bare mpi4py call, and mpidist's ways, as calls without arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import InvalidArgument, MpidistError, Unsupported
from ..schedule.registry import find
from .cases import BARE, PRIVATE, SYMMETRIC, Case

_OPERATIONS = {
    "sum": "SUM",
    "prod": "PROD",
    "max": "MAX",
    "min": "MIN",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}
_LOGICAL = {"and": "LAND", "or": "LOR", "xor": "LXOR", "max": "LOR", "min": "LAND"}


MEMORIES = {PRIVATE: (PRIVATE,), SYMMETRIC: (SYMMETRIC,), "both": (PRIVATE, SYMMETRIC)}
"""By what a user asks for: the kinds of memory that are measured beside the baselines."""


@dataclass(frozen=True)
class Contender:
    """A way to serve a collective, and the kind of memory that its arrays are in."""

    name: str
    memory: str = PRIVATE


def way_names(comm: Any, collective: str) -> list[str]:
    """Give the names of all ways that there are to serve a collective, native first."""
    return [way.name for way in comm.explain(collective, 8)[1]]


def contenders(
    comm: Any,
    collective: str,
    names: Sequence[str] | None,
    memory: str = PRIVATE,
    collectives: Sequence[str] = (),
) -> list[Contender]:
    """Give the contenders of a collective.

    The bare call is the first; it and, with other memory, a native call are always on private
    arrays: the baselines gain and lose nothing by the memory that the others have.

    Parameters
    ----------
    comm : Communicator
        Whose ways they are.
    collective : str
        Which.
    names : sequence of str, optional
        Those asked for; by default native, auto and every way there is.
    memory : {"private", "symmetric", "both"}
        Where their arrays are.
    collectives : sequence of str
        All that are measured: a name that only one of them knows is no error.

    Raises
    ------
    UnknownName
        If no collective that is measured has an algorithm of that name.
    """
    if memory not in MEMORIES:
        raise InvalidArgument(f"memory={memory!r}: allowed are {', '.join(MEMORIES)}")
    kinds = MEMORIES[memory]
    chosen = ["native", "auto", *way_names(comm, collective)] if names is None else names
    for name in names or ():
        if name not in (BARE, "native", "auto"):
            _find_any(comm, name, (collective, *collectives))
    found = [Contender(BARE)]
    if SYMMETRIC in kinds:
        found.append(Contender("native"))
    for kind in kinds:
        found += [Contender(name, kind) for name in chosen if name != BARE]
    if names is None or len(kinds) > 1:  # what is defined by its memory is no contender elsewhere
        found = [c for c in found if c.name != SYMMETRIC or c.memory == SYMMETRIC]
    return list(dict.fromkeys(found))


def _find_any(comm: Any, name: str, collectives: Sequence[str]) -> None:
    failures = [_unknown(comm, name, collective) for collective in collectives]
    if failures and all(failures):
        raise failures[0]  # type: ignore[misc]


def knows(comm: Any, name: str, collective: str) -> bool:
    """Tell whether a collective can be asked for by that name."""
    return name in (BARE, "auto") or _unknown(comm, name, collective) is None


def _unknown(comm: Any, name: str, collective: str) -> MpidistError | None:
    if name in way_names(comm, collective):
        return None
    try:
        find(collective, name)
    except MpidistError as error:
        return error
    return None


def ours(comm: Any, case: Case, algorithm: str) -> Callable[[], Any]:
    """Give mpidist's call of a case by one algorithm."""
    x, out, op, root = case.x, case.out, case.op, case.root
    method = getattr(comm, case.collective)
    return {
        "allreduce": partial(method, x, op, out, algorithm),
        "reduce": partial(method, x, op, root, out, algorithm),
        "reduce_scatter": partial(method, x, op, out, algorithm),
        "broadcast": partial(method, x, root, None, algorithm),
        "allgather": partial(method, x, out, algorithm),
        "gather": partial(method, x, root, out, algorithm),
        "scatter": partial(method, x, root, out, algorithm),
        "alltoall": partial(method, x, out, algorithm),
        "barrier": partial(method, algorithm),
    }[case.collective]


def bare(comm: Any, case: Case) -> Callable[[], Any]:
    """Give the call as a user of mpi4py writes it, on the communicator that mpidist uses as well.

    Raises
    ------
    Unsupported
        If there is no MPI, or it has no such operation for this dtype.
    """
    if comm.backend.name != "mpi":
        raise Unsupported(f"the {comm.backend.name} backend is not MPI")
    from mpi4py import MPI

    mpi = comm.backend.comm
    if case.collective == "barrier":
        return mpi.Barrier
    op = None if case.op is None else _operation(case)
    x, out = _buffer(case.x, op), _buffer(case.out, op)
    here, root = case.rank == case.root, case.root
    inside, at_root = case.in_place, case.in_place and here
    source = MPI.IN_PLACE if inside else x
    return {
        "allreduce": lambda: partial(mpi.Allreduce, source, out, op),
        "reduce": lambda: partial(mpi.Reduce, MPI.IN_PLACE if at_root else x, out, op, root),
        "reduce_scatter": lambda: partial(
            mpi.Reduce_scatter_block, source, x if inside else out, op
        ),
        "broadcast": lambda: partial(mpi.Bcast, x, root),
        "allgather": lambda: partial(mpi.Allgather, source, out),
        "gather": lambda: partial(mpi.Gather, MPI.IN_PLACE if at_root else x, out, root),
        "scatter": lambda: partial(mpi.Scatter, x, MPI.IN_PLACE if at_root else out, root),
        "alltoall": lambda: partial(mpi.Alltoall, source, out),
    }[case.collective]()


def _operation(case: Case) -> Any:
    """Give MPI's operation, where it has one for this dtype."""
    assert case.op is not None and case.x is not None
    from mpi4py import MPI

    from ..backends.native import mpi_datatype

    dtype = case.x.dtype
    name = (_LOGICAL if dtype.kind == "b" else _OPERATIONS).get(case.op.name)
    if name is None or mpi_datatype(dtype) is None:
        raise Unsupported(f"MPI has no {case.op.name} of {dtype}")
    return getattr(MPI, name)


def _buffer(data: np.ndarray | None, op: Any) -> Any:
    """Give what mpi4py takes: the array, or its bytes where it is only moved."""
    if data is None or op is not None:
        return data
    return data.view(np.uint8)
