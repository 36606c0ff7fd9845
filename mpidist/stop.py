"""An early end of a job: SLURM signals one of its processes, and all ranks stop at one step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from .communicator.communicator import Communicator
from .errors import InvalidArgument

in_elastic: list[object] = []
"""Jobs of ``md.elastic`` that run: they end MPI, together with the spares."""


class Stopped(SystemExit):
    """The end that :meth:`StopRequest.leave` has brought about on all ranks."""


def end_mpi(comm: Communicator) -> None:
    """End MPI, lest an exit code other than 0 aborts the other ranks; collective."""
    if comm.backend.name == "mpi":
        from mpi4py import MPI

        MPI.Finalize()


class StopRequest:
    """Records stop signals; all ranks agree whether any of them has received one.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    signals : iterable of signal, optional
        The signals; by default SIGUSR1, as sent by ``#SBATCH --signal=B:USR1@60`` and forwarded to
        every rank by ``mpidist run``.

    Notes
    -----
    The handlers of these signals are replaced.  Only the main thread can create a StopRequest.
    One that a function of ``md.elastic`` creates anew after a loss knows what the one before has
    received.

    Examples
    --------
    >>> import mpidist
    >>> mpidist.run_simulated(1, lambda comm: mpidist.StopRequest(comm, ()).requested())
    [False]
    """

    def __init__(self, comm: Communicator, signals: Iterable[signal.Signals] = (signal.SIGUSR1,)):
        self._comm, self._received = comm, False
        for number in signals:
            try:
                before = getattr(signal.signal(number, self._note), "__self__", None)
            except ValueError as error:
                raise InvalidArgument(f"rank {comm.rank}: StopRequest: {error}") from error
            # A signal comes once, and a loss may come before its answer.
            if in_elastic and isinstance(before, StopRequest):
                self._received |= before._received

    # It may run between any two lines, even within a collective call: a flag is all that is safe.
    def _note(self, number: int, frame: Any) -> None:
        self._received = True

    def requested(self) -> bool:
        """Return whether any rank has received one of the signals since creation; collective.

        The answer is the same on all ranks.
        """
        mine = np.array([self._received], dtype=np.int32)
        return bool(self._comm.allreduce(mine, op="max")[0])

    def leave(self, status: int = os.EX_TEMPFAIL) -> NoReturn:
        """End this process with an exit code, after a barrier and MPI_Finalize; collective.

        Save the state before.  In a function of ``md.elastic`` the spares end as well.

        Parameters
        ----------
        status : int
            The exit code; by default EX_TEMPFAIL (75), with which ``mpidist run --requeue`` has
            SLURM start the job again.
        """
        self._comm.barrier()
        if not in_elastic:
            end_mpi(self._comm)
        raise Stopped(status)
