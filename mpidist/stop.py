"""An early end of a job: SLURM signals one of its processes, and all ranks stop at one step."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import numpy as np

from .arguments import whole
from .communicator.communicator import Communicator
from .communicator.launcher_notes import send_note
from .errors import InvalidArgument
from .measure import counted


class Elastic(Protocol):
    """A job of ``md.elastic`` that runs in this process."""

    comm: Communicator | None
    training: int  # its number in this program
    generation: int


in_elastic: list[Elastic] = []


class Stopped(SystemExit):
    """The end of all ranks, as :meth:`StopRequest.leave` has brought it about."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status

    def announce(self) -> None:
        """Let this process end by its exit code, which is no failure and ends no other rank."""
        send_note(asked=self.status)
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None:
            # As mpi4py.run has seen an exit code, it would call MPI_Abort.  To end MPI here would
            # be too soon: traces are written at exit, and threads use MPI until then.
            atexit.register(mpi._set_abort_status, 0)


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
    One that a function of ``md.elastic`` creates knows a signal that the one before has received
    and not answered, and after a loss any.

    Examples
    --------
    >>> import mpidist
    >>> mpidist.run_simulated(1, lambda comm: mpidist.StopRequest(comm, ()).requested())
    [False]
    """

    def __init__(self, comm: Communicator, signals: Iterable[signal.Signals] = (signal.SIGUSR1,)):
        self._comm, self._received = comm, False
        job = in_elastic[-1] if in_elastic else None
        self._made = (0, 0) if job is None else (job.training, job.generation)
        self._answered = False
        for number in signals:
            try:
                before = getattr(signal.signal(number, self._note), "__self__", None)
            except ValueError as error:
                raise InvalidArgument(f"rank {comm.rank}: StopRequest: {error}") from error
            # A signal comes once, and a loss may come before its answer, or the end of a training.
            if in_elastic and isinstance(before, StopRequest) and before._received:
                (training, generation), (other, earlier) = self._made, before._made
                if not before._answered or (training == other and generation > earlier):
                    self._received = True

    # It may run between any two lines, even within a collective call: a flag is all that is safe.
    def _note(self, number: int, frame: Any) -> None:
        self._received = True

    def requested(self) -> bool:
        """Return whether any rank has received one of the signals since creation; collective.

        The answer is the same on all ranks.
        """
        mine = np.array([self._received], dtype=np.int32)
        answer = bool(self._comm.allreduce(mine, op="max")[0])
        self._answered |= answer
        return answer

    def leave(self, status: int = os.EX_TEMPFAIL) -> NoReturn:
        """End this process with an exit code, after a barrier; collective.

        Save the state before.  In a function of ``md.elastic`` the spares end as well.

        Parameters
        ----------
        status : int
            The exit code, 0 to 255; by default EX_TEMPFAIL (75), with which ``mpidist run
            --requeue`` has SLURM start the job again.

        Raises
        ------
        InvalidArgument
            If the exit code is none, or if this is of some of the ranks that ``md.elastic`` trains
            on.
        """
        comm = self._comm
        where, most = f"rank {comm.rank}: leave: ", " and <= 255"
        if whole("status", status, 0, where, most) > 255:
            raise InvalidArgument(f"{where}status={status!r}: expected a whole number >= 0{most}")
        of = in_elastic[-1].comm if in_elastic else None
        if of is not None and of.size != comm.size:
            raise InvalidArgument(
                f"{where}this StopRequest is of {counted(comm.size, 'rank')}: expected one of the "
                f"{of.size} that md.elastic trains on"
            )
        comm.barrier()
        end = Stopped(int(status))
        if not in_elastic:
            end.announce()
        raise end
