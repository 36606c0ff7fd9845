"""A job that is to end soon: SLURM tells one of its processes, and all ranks stop at one step."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from .errors import InvalidArgument


class StopRequest:
    """Tells whether any rank was asked to stop, the same on all ranks.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    signals : iterable of signal, optional
        What asks for it; by default SIGUSR1, as of ``#SBATCH --signal=B:USR1@60``: ``mpidist run``
        hands it on to every rank.

    Notes
    -----
    The handlers of these signals are replaced.  It must be made in the main thread.

    Examples
    --------
    >>> import mpidist
    >>> mpidist.run_simulated(1, lambda comm: mpidist.StopRequest(comm, ()).requested())
    [False]
    """

    def __init__(self, comm: Any, signals: Iterable[signal.Signals] = (signal.SIGUSR1,)):
        self._comm, self._asked = comm, False
        for number in signals:
            try:
                signal.signal(number, self._note)
            except ValueError as error:
                raise InvalidArgument(f"rank {comm.rank}: StopRequest: {error}") from error

    def _note(self, number: int, frame: Any) -> None:
        self._asked = True

    def requested(self) -> bool:
        """Tell whether to stop; collective, so that all ranks stop at the same step."""
        mine = np.array([self._asked], dtype=np.int32)
        return bool(self._comm.allreduce(mine, op="max")[0])

    def leave(self, status: int = os.EX_TEMPFAIL) -> NoReturn:
        """End this process; collective, once what is to be kept was saved.

        Parameters
        ----------
        status : int
            The exit code; by default the one upon which ``mpidist run --requeue`` has SLURM start
            the job again (EX_TEMPFAIL, 75).
        """
        self._comm.barrier()
        if self._comm.backend.name == "mpi":
            from mpi4py import MPI

            MPI.Finalize()  # all ranks end well: none must abort the job because of its exit code
        sys.exit(status)
