"""The candidates of a measurement: the bare mpi4py call, and mpidist's executors and algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument, MpidistError, Unsupported
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import find
from ..selection.tuning import MEMORIES, PRIVATE, SYMMETRIC
from .cases import BARE, Case

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


MEMORY_CHOICES = ("auto", PRIVATE, SYMMETRIC, "both")
"""The values of ``memory``; see :func:`candidates`."""


@dataclass(frozen=True)
class Candidate:
    """An executor or algorithm to measure, and the kind of memory of its arrays.

    `other` is for a library that is measured beside mpidist: it takes a case, and returns a
    function without arguments that runs it, or raises :class:`~mpidist.Unsupported`.  `before` is
    called before each call, untimed.
    """

    name: str
    memory: str = PRIVATE
    other: Callable[[Case], Callable[[], Any]] | None = None
    before: Callable[[], Any] | None = None

    def runner(self, comm: Communicator, case: Case) -> Callable[[], Any]:
        """Return a function without arguments that runs a case."""
        if self.other is not None:
            return self.other(case)
        return bare(comm, case) if self.name == BARE else ours(comm, case, self.name)


def memories(comm: Communicator, collective: str) -> tuple[str, ...]:
    """Return the kinds of memory that the arrays of a collective can have on these ranks."""
    possible = comm.topology.num_nodes == 1 and comm.backend.native is not None
    return MEMORIES if possible and collective != "barrier" else (PRIVATE,)


def names_of(comm: Communicator, collective: str) -> list[str]:
    """Return the names of the executors and algorithms that serve a collective, native first."""
    return [one.name for one in comm.explain(collective, 8)[1]]


def candidates(
    comm: Communicator,
    collective: str,
    names: Sequence[str] | None,
    memory: str = PRIVATE,
    collectives: Sequence[str] = (),
) -> list[Candidate]:
    """Return the candidates of a collective, the bare mpi4py call first.

    The bare call always has private arrays.  If `memory` is "symmetric" or "both", "native" with
    private arrays is the second candidate: these baselines are the same whatever `memory` is.  By
    default (`names` None) native, auto and all executors and algorithms.  With `memory` "auto"
    arrays are private, except that the candidate "auto" is in both kinds of memory, and "symmetric"
    in symmetric memory, where these ranks have it.  `collectives` are all those of the run: a name
    is accepted if any of them has such an algorithm.
    """
    if memory not in MEMORY_CHOICES:
        raise InvalidArgument(f"memory={memory!r}: expected {', '.join(MEMORY_CHOICES)}")
    chosen = ["native", "auto", *names_of(comm, collective)] if names is None else names
    for name in names or ():
        if name not in (BARE, "native", "auto"):
            _find_any(comm, name, (collective, *collectives))
    found = [Candidate(BARE)]
    if memory == "auto":
        possible = memories(comm, collective)
        own = {"auto": possible, SYMMETRIC: possible[-1:]}
        found += [Candidate(name, kind) for name in chosen for kind in own.get(name, (PRIVATE,))]
    else:
        kinds = MEMORIES if memory == "both" else (memory,)
        if SYMMETRIC in kinds:
            found.append(Candidate("native"))
        found += [Candidate(name, kind) for kind in kinds for name in chosen]
    found = [c for c in found if c.name != BARE or c == Candidate(BARE)]
    if names is None or memory == "both":  # "symmetric" needs symmetric memory
        found = [c for c in found if c.name != SYMMETRIC or c.memory == SYMMETRIC]
    return list(dict.fromkeys(found))


def _find_any(comm: Communicator, name: str, collectives: Sequence[str]) -> None:
    failures = [_unknown(comm, name, collective) for collective in collectives]
    if failures and all(failures):
        raise failures[0]  # type: ignore[misc]


def knows(comm: Communicator, name: str, collective: str) -> bool:
    """Return whether `name` is "auto", "mpi4py" or a name that `collective` knows."""
    return name in (BARE, "auto") or _unknown(comm, name, collective) is None


def _unknown(comm: Communicator, name: str, collective: str) -> MpidistError | None:
    if name in names_of(comm, collective):
        return None
    try:
        find(collective, name)
    except MpidistError as error:
        return error
    return None


def ours(comm: Communicator, case: Case, algorithm: str) -> Callable[[], Any]:
    """Return a function without arguments that runs a case by mpidist with ``algorithm=``."""
    contract, method = COLLECTIVES[case.collective], getattr(comm, case.collective)
    if contract.idempotent:
        return partial(method, algorithm)
    op, root = [case.op] * contract.reduces, [case.root] * contract.rooted
    return partial(method, case.x, *op, *root, case.out, algorithm)


def mpi_communicator(comm: Communicator) -> Any:
    """Return the mpi4py communicator that mpidist uses.

    Raises Unsupported if the communicator's backend is not MPI.
    """
    if comm.backend.name != "mpi":
        raise Unsupported(f"the {comm.backend.name} backend is not MPI: it has no mpi4py call")
    from ..backends.mpi import MpiBackend

    assert isinstance(comm.backend, MpiBackend)
    return comm.backend.comm


def bare(comm: Communicator, case: Case) -> Callable[[], Any]:
    """Return a function without arguments that runs a case by the bare mpi4py call.

    It uses the same MPI communicator as mpidist.  Raises Unsupported if there is no MPI, or MPI has
    no such operation for this dtype.
    """
    return bare_on(mpi_communicator(comm), case)


def bare_on(mpi: Any, case: Case) -> Callable[[], Any]:
    """Return a function as :func:`bare` does, for an mpi4py communicator."""
    from mpi4py import MPI

    if case.collective == "barrier":
        return mpi.Barrier
    op = None if case.op is None else _operation(case)
    x, out = _buffer(case.x, op), _buffer(case.out, op)
    here, root = case.rank == case.root, case.root
    inside, at_root = case.in_place, case.in_place and here
    source = MPI.IN_PLACE if inside else x
    return {
        "scan": lambda: partial(mpi.Scan, source, out, op),
        "exscan": lambda: partial(mpi.Exscan, source, _filled(case), op),
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


def _filled(case: Case) -> np.ndarray:
    """Return the memory that ``Exscan`` fills, or may fill: that of rank 0 is not checked."""
    if case.out is not None:
        return case.out
    assert case.x is not None
    return case.x if case.in_place else np.empty_like(case.x)


def _operation(case: Case) -> Any:
    """Return MPI's operation for the reduction `case`; raise Unsupported if the dtype has none."""
    assert case.op is not None and case.x is not None
    from mpi4py import MPI

    from ..backends.native import mpi_datatype

    dtype = case.x.dtype
    name = (_LOGICAL if dtype.kind == "b" else _OPERATIONS).get(case.op.name)
    if name is None or mpi_datatype(dtype) is None:
        raise Unsupported(f"MPI has no {case.op.name} of {dtype}")
    return getattr(MPI, name)


def _buffer(data: np.ndarray | None, op: Any) -> Any:
    """Return the buffer for mpi4py: `data` itself for a reduction, else a view of its bytes.

    `op` is MPI's operation of a reduction, else None.  Without `data` the result is None.
    """
    if data is None or op is not None:
        return data
    return data.view(np.uint8)
