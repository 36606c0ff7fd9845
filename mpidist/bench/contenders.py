"""Who is measured: the bare mpi4py call, and mpidist's ways, as calls without arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import MpidistError, Unsupported
from ..schedule.registry import algorithms, find
from .cases import Case

BARE = "mpi4py"
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


def contender_names(
    collective: str, names: Sequence[str] | None, collectives: Sequence[str]
) -> list[str]:
    """Give the contenders of a collective; the first is the bare call.

    Raises
    ------
    UnknownName
        If no collective that is measured has an algorithm of that name.
    """
    if names is None:
        return [BARE, "native", *(a.name for a in algorithms(collective))]
    for name in names:
        if name not in (BARE, "native", "auto"):
            _find_any(name, collectives)
    return list(dict.fromkeys([BARE, *names]))


def _find_any(name: str, collectives: Sequence[str]) -> None:
    failures: list[MpidistError] = []
    for collective in collectives:
        try:
            find(collective, name)
            return
        except MpidistError as error:
            failures.append(error)
    raise failures[0]


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
