"""The collectives in the background: as the blocking ones, but they give a Work at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from . import arguments
from .operations import Op
from .work import Work

if TYPE_CHECKING:
    from .communicator import Communicator


def iallreduce(
    self: Communicator,
    x: Any,
    op: str | Op | Callable = "sum",
    out: Any = None,
    algorithm: str = "auto",
    *,
    commute: bool | None = None,
) -> Work:
    """Begin :meth:`allreduce`; the arrays are not to be touched before ``wait()``."""
    return self._begin(
        "allreduce", partial(arguments.reducing, self, "allreduce", x, op, out, commute), algorithm
    )


def ireduce(
    self: Communicator,
    x: Any,
    op: str | Op | Callable = "sum",
    root: int = 0,
    out: Any = None,
    algorithm: str = "auto",
    *,
    commute: bool | None = None,
) -> Work:
    """Begin :meth:`reduce`."""
    return self._begin(
        "reduce", partial(arguments.reducing, self, "reduce", x, op, out, commute, root), algorithm
    )


def ibroadcast(
    self: Communicator,
    x: Any,
    root: int = 0,
    out: Any = None,
    algorithm: str = "auto",
) -> Work:
    """Begin :meth:`broadcast`."""
    return self._begin("broadcast", partial(arguments.broadcasting, self, x, out, root), algorithm)


def iallgather(
    self: Communicator,
    x: Any,
    out: Any = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
) -> Work:
    """Begin :meth:`allgather`."""
    return self._begin(
        "allgather",
        partial(arguments.gathering, self, "allgather", x, out, counts),
        algorithm,
    )


def igather(
    self: Communicator,
    x: Any,
    root: int = 0,
    out: Any = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
) -> Work:
    """Begin :meth:`gather`."""
    return self._begin(
        "gather",
        partial(arguments.gathering, self, "gather", x, out, counts, root),
        algorithm,
    )


def ireduce_scatter(
    self: Communicator,
    x: Any,
    op: str | Op | Callable = "sum",
    out: Any = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
    commute: bool | None = None,
) -> Work:
    """Begin :meth:`reduce_scatter`."""
    return self._begin(
        "reduce_scatter",
        partial(arguments.reduce_scattering, self, x, op, out, counts, commute),
        algorithm,
    )


def iscatter(
    self: Communicator,
    x: Any,
    root: int = 0,
    out: Any = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
) -> Work:
    """Begin :meth:`scatter`; without `out`, the root's shape is told before this returns."""
    return self._begin(
        "scatter", partial(arguments.scattering, self, x, out, counts, root), algorithm
    )


def ialltoall(
    self: Communicator,
    x: Any,
    out: Any = None,
    algorithm: str = "auto",
    *,
    counts: Sequence[int] | None = None,
) -> Work:
    """Begin :meth:`alltoall`; one row of counts is exchanged before this returns."""
    return self._begin("alltoall", partial(arguments.exchanging, self, x, out, counts), algorithm)


def ibarrier(self: Communicator, algorithm: str = "auto") -> Work:
    """Begin :meth:`barrier`."""
    return self._begin("barrier", partial(arguments.meeting, self), algorithm)
