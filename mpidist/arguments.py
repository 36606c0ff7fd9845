"""What the arguments of each collective mean, blocking or in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import prepare
from .arrays import as_input, kind_of_memory
from .objects import barrier_call
from .operations import find_op
from .prepare import Prepared

if TYPE_CHECKING:
    from .communicator import Communicator


def reducing(
    self: Communicator,
    collective: str,
    x: Any,
    op: Any,
    out: Any,
    commute: bool | None,
    root: int = 0,
) -> Prepared:
    """Prepare allreduce and reduce."""
    return prepare.reducing(collective, x, find_op(op, commute), out, self._place, self._root(root))


def broadcasting(self: Communicator, x: Any, out: Any, root: int) -> Prepared:
    """Prepare broadcast."""
    return prepare.broadcast(x, out, self._place, self._root(root))


def gathering(
    self: Communicator, collective: str, x: Any, out: Any, counts: Any, root: int = 0
) -> Prepared:
    """Prepare allgather and gather."""
    return prepare.gathering(collective, x, out, counts, self._place, self._root(root))


def reduce_scattering(
    self: Communicator, x: Any, op: Any, out: Any, counts: Any, commute: bool | None
) -> Prepared:
    """Prepare reduce_scatter."""
    return prepare.reduce_scatter(x, find_op(op, commute), out, counts, self._place)


def scattering(self: Communicator, x: Any, out: Any, counts: Any, root: int) -> Prepared:
    """Prepare scatter; without `out`, the root first tells shape and dtype."""
    told, root = None, self._root(root)
    if out is None:
        mine = None
        if self.rank == root:
            data = as_input(x, self.rank, device=True)
            mine = (data.shape, data.dtype, kind_of_memory(x))
        what = f"scatter root={root} without out"
        if self._debug:  # else the ranks would wait for each other before they agree
            self._agreed(what, tuple)
        service = self._service
        told = service.set_up(what, lambda: service.everyone(mine)[root], "exchange of the shape")
    return prepare.scatter(x, out, counts, self._place, root, told)


def exchanging(self: Communicator, x: Any, out: Any, counts: Any) -> Prepared:
    """Prepare alltoall; with one row of counts, the ranks first exchange them."""
    if counts is None:
        return prepare.alltoall(x, out, None, None, self._place)
    if np.ndim(counts) == 2:
        table = [prepare.check_counts(row, self._place) for row in counts]
        if len(table) != self.size:
            raise self._place.wrong(f"counts has {len(table)} rows for {self.size} ranks")
        return prepare.alltoall(
            x, out, table[self.rank], [row[self.rank] for row in table], self._place
        )
    sends = prepare.check_counts(counts, self._place)
    exchange = prepare.alltoall(np.array(sends), None, None, None, self._place)
    if self._debug:
        self._agreed("alltoall with one row of counts", tuple)
    receives = self._service.serve(exchange, "auto", "alltoall, exchange of counts: ")
    return prepare.alltoall(x, out, sends, receives.tolist(), self._place)


def meeting(self: Communicator) -> Prepared:
    """Prepare a barrier."""
    return barrier_call(self._place)
