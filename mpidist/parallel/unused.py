"""Parameters that a step did not use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidArgument


class Unused:
    """What it means that a parameter got no gradient: nothing, or an error.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    named : sequence of (str, parameter)
        The parameters.
    how : {"zero", "error"}
        See :class:`~mpidist.parallel.DDP`.
    """

    HOW = ("zero", "error")

    def __init__(self, comm: Any, named: Sequence[tuple[str, Any]], how: str):
        if how not in self.HOW:
            raise InvalidArgument(
                f"rank {comm.rank}: unused={how!r}: allowed are {', '.join(map(repr, self.HOW))}"
            )
        self._comm, self._how = comm, how
        self._names = [name for name, _ in named]

    def check(self, touched: np.ndarray) -> None:
        """Look at what was used since the last time, and forget it.

        Raises
        ------
        InvalidArgument
            On every rank alike, with names and ranks, if that is an error.
        """
        if self._how == "error" and len(touched):
            used = self._comm.allgather(touched[None])
            missing = [
                f"{name} (on rank {', '.join(map(str, np.flatnonzero(column == 0)))})"
                for name, column in zip(self._names, used.T, strict=True)
                if not column.all()
            ]
            if missing:
                touched[:] = 0
                raise InvalidArgument(
                    f"rank {self._comm.rank}: parameters without a gradient: {'; '.join(missing)}; "
                    "unused='zero' takes zeros for those"
                )
        touched[:] = 0
