"""Which memory a rank passes to a collective, what it fills in, and what must come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .cases import Case

STRIDE = 7  # between the windows of two ranks


def _allreduce(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    case.sources = [(case.x, g, STRIDE * case.rank)]
    case.expected = [(case.out, e, 0)]


def _reduce(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    case.sources = [(case.x, g, STRIDE * case.rank)]
    if case.rank == case.root:
        case.expected = [(case.out, e, 0)]
    else:
        case.out = None


def _reduce_scatter(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = case.rank * part
    assert case.x is not None and case.out is not None
    case.sources = [(case.x, g, STRIDE * case.rank)]
    case.out = case.out[begin : begin + part] if case.in_place else case.out[:part]
    case.expected = [(case.out, e, begin)]
    if case.in_place:  # MPI leaves it in front, mpidist where the part of this rank is
        case.bare_expected = [(case.x[:part], e, begin)]


def _broadcast(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = STRIDE * case.root
    if case.rank == case.root:
        case.sources = [(case.x, g, begin)]
    case.out, case.expected = None, [(case.x, g, begin)]


def _allgather(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = case.rank * part
    assert case.x is not None
    case.x = case.x[begin : begin + part] if case.in_place else case.x[:part]
    case.sources = [(case.x, g, begin)]
    case.expected = [(case.out, g, 0)]


def _gather(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = case.rank * part
    assert case.x is not None
    case.x = _own_part(case, case.x, part)
    case.sources = [(case.x, g, begin)]
    case.expected = [(case.out, g, 0)]
    if case.rank != case.root:
        case.out, case.expected = None, []


def _scatter(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    begin = case.rank * part
    assert case.out is not None
    case.out = _own_part(case, case.out, part)
    case.expected = [(case.out, g, begin)]
    if case.rank == case.root:
        case.sources = [(case.x, g, 0)]
    else:
        case.x = None


def _own_part(case: Case, memory: np.ndarray, part: int) -> np.ndarray:
    """Give this rank's part: in place, the root has it in the whole; the others have no whole."""
    begin = case.root * part if case.in_place and case.rank == case.root else 0
    return memory[begin : begin + part]


def _alltoall(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    assert case.x is not None and case.out is not None
    r, p = case.rank, case.size
    for peer in range(p):
        rows = slice(peer * part, (peer + 1) * part)
        case.sources.append((case.x[rows], g, STRIDE * (r * p + peer)))
        case.expected.append((case.out[rows], g, STRIDE * (peer * p + r)))


def _barrier(case: Case, g: np.ndarray, e: np.ndarray, part: int) -> None:
    case.x = case.out = None


LAYOUT = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "barrier": _barrier,
}
"""By collective: (case, g, E, elements of one part) to the case with its memory and windows."""
