"""The end of a run: gradients are brought together, and all ranks agree on how it went."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...errors import CommunicationError, MpidistError, RankFailed, ScheduleError
from ...pipeline import Span
from .averaging import Averaging
from .live import Live
from .plan import Plan
from .tied import Tied


class Ended(NamedTuple):
    """The last run that had a way back.

    Attributes
    ----------
    plan : Plan
        What was run.
    spans : tuple of Span
        Its actions.
    peak, peak_bytes, predicted : int
        The most activations that were alive, their bytes, and what the schedule says.
    """

    plan: Plan
    spans: tuple[Span, ...]
    peak: int
    peak_bytes: int
    predicted: int


class Ending:
    """What is left when every action has ended.

    Parameters
    ----------
    comm : Communicator
        The pipeline's own.
    averaging : Averaging
        Of the replicas.
    tied : Tied
        Parameters that ranks share.
    """

    def __init__(self, comm: Any, averaging: Averaging, tied: Tied):
        self._comm, self._averaging, self._tied = comm, averaging, tied
        self._sums = np.zeros(2)  # over the ranks: the loss, and how many failed

    def sync(self, live: Live, predicted: int, name: str) -> MpidistError | None:
        """Bring gradients together; give what only this rank may know to be wrong."""
        problem: MpidistError | None = None
        for sync in (self._averaging.sync, self._tied.sync):  # both, as other ranks wait in them
            try:
                sync()
            except CommunicationError:
                raise
            except MpidistError as error:
                problem = problem or error
        if problem is None and (live.count or live.peak > predicted):
            problem = ScheduleError(
                f"{live.peak} activations were alive at a time and {live.count} still are, "
                f"{predicted} and 0 are what {name} promises",
                rank=self._comm.rank,
            )
        return problem

    def agree(self, loss: float | None, problem: MpidistError | None) -> float:
        """Give the loss, which one rank has at most; collective.

        Raises
        ------
        MpidistError
            On every rank, if any has a problem: its own, or else RankFailed.
        """
        self._sums[0], self._sums[1] = loss or 0.0, problem is not None
        self._comm.allreduce(self._sums, out=self._sums)
        if self._sums[1]:
            raise self._told(problem)
        return float(self._sums[0])

    def _told(self, problem: MpidistError | None) -> MpidistError:
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        everyone = self._comm.allgather_object(said)
        if problem is not None:
            return problem
        rank = next(rank for rank, text in enumerate(everyone) if text is not None)
        error = RankFailed(f"rank {rank} ended its part of the step with {everyone[rank]}")
        error.echo = True
        return error
