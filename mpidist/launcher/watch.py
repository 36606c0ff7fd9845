"""A job whose ranks are monitored: every rank reports how it ended, which decides the exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..communicator.failure import FULL_TRACEBACK
from ..communicator.launcher_notes import STARTED, STARTING
from ..errors import LaunchError
from .boxes import SHOWN_WITHIN, Boxes, write_fully
from .connections import LOST, SECRET, Connections, RankState
from .failures import INTERRUPT, Failures
from .mpi import say
from .processes import end_processes, remove_session_files

TO_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
TO_LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """A record of the signals that this process has received, in their order."""

    def __init__(self) -> None:
        self._received: list[int] = []

    @contextlib.contextmanager
    def recorded(self, *numbers: signal.Signals) -> Iterator[None]:
        """Within a ``with`` block, record these signals instead of calling their handlers.

        Outside of the main thread, which alone may set handlers, none is recorded.
        """
        if threading.current_thread() is not threading.main_thread():
            numbers = ()
        before = {number: signal.signal(number, self._record) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _record(self, number: int, _: Any) -> None:
        self._received.append(number)

    def pending(self) -> Iterator[int]:
        """Yield the signals that were received since the last call of this method."""
        while self._received:
            yield self._received.pop(0)


def by_terminal(number: int) -> bool:
    """Return whether a signal is a Ctrl-C that the terminal has probably sent to the launcher too.

    The sender is unknown (any thread may receive the signal); if this process group is in the
    foreground, the terminal is assumed.
    """
    if number != signal.SIGINT:
        return False
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    environ: Mapping[str, str],
    boxes: Boxes,
    preexec: Callable[[], object] | None = None,
    stdin: int | None = None,
) -> Iterator[subprocess.Popen]:
    """Yield the started launcher; if it outlives the ``with`` block, end it and its ranks.

    `boxes` copies its output, and with ``MPIDIST_FULL_TRACEBACK`` holds nothing back.
    """
    try:
        launcher = subprocess.Popen(
            command,
            env=environ,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            preexec_fn=preexec,
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    try:
        boxes.copy(launcher, environ.get(FULL_TRACEBACK, "") in ("", "0"))
        yield launcher
    finally:
        if launcher.poll() is None:
            end_processes(launcher, environ=environ)
        remove_session_files(launcher.pid, environ)
        boxes.wait()
        boxes.show()


RANK_PROCESS = str(Path(__file__).with_name("rank_process.py"))
PATIENCE = 8.0  # seconds that the launcher has to end a job after a rank failed
STEP = 3.0  # seconds between SIGTERM to ranks, SIGKILL to ranks, SIGTERM, SIGKILL to the launcher
CAUSE_WITHIN = 1.0  # seconds after a lost rank in which the rank that caused it may report
LAST_REPORTS, AFTER_FAILURE = 5.0, 0.5  # seconds for reports after the launcher has ended
ENDS_WITHIN = 30.0  # seconds that the launcher has to end after all ranks succeeded
STARTED_WITHIN = 60.0  # seconds after which missing ranks are reported
MPI_WITHIN = 120.0  # seconds that MPI_Init may take after the last rank has entered it


@dataclass
class JobWatch:
    """Runs a launcher, and monitors its ranks.

    Parameters
    ----------
    ranks : int
        Number of ranks of the job.
    label : bool
        Whether each line of output begins with its rank.
    logs : str, optional
        Folder for one file of output for each rank.
    kill_wait : float, optional
        Seconds from a SIGTERM of SLURM to its SIGKILL (KillWait), within which the job must end.
    signals : Signals
        Signals that this process has received already.
    start_timeout : float
        Seconds that MPI_Init may take after the last rank has entered it.
    local : bool
        Whether all ranks are on this machine.
    limit : float, optional
        Seconds after which the job is ended.
    stdin : int, optional
        Standard input of the launcher, as of ``subprocess``; by default that of this process.
    write : callable
        Writes the output: see :class:`~mpidist.launcher.boxes.Boxes`.
    ended : list of RankState
        The ranks that have ended, in the order of their ends.

    Attributes
    ----------
    late : bool
        Whether the job was ended because of `limit`.
    interrupted : int
        The first signal to end the job that this process received; 0 for none.
    told : str
        How the rank that failed first did so; empty before that is known.
    """

    ranks: int
    label: bool = False
    logs: str | None = None
    kill_wait: float | None = None
    signals: Signals = field(default_factory=Signals)
    start_timeout: float = MPI_WITHIN
    local: bool = False
    limit: float | None = None
    stdin: int | None = None
    write: Callable[[int, bytes], object] = write_fully
    ended: list[RankState] = field(default_factory=list)  # in the order of their ends

    def __post_init__(self) -> None:
        self.failures = Failures(self.ranks)
        self.connections = Connections(self.ranks, self._end, self.failures.add, self.local)
        self._boxes = Boxes(self.write)
        self.late, self.interrupted, self.told = False, 0, ""
        self._patience, self._step = PATIENCE, STEP
        self._failed_since: float | None = None
        self._succeeded_since: float | None = None
        self._reported = self._reported_missing = self._stuck_at_start = False
        self._told_why = False  # by an exception
        self._steps = 0  # steps taken to end the job

    def command(self, program: Sequence[str]) -> list[str]:
        """Return the command that the launcher starts for each rank: a monitor of `program`."""
        options = ["label"] * self.label + [f"logs={self.logs}"] * bool(self.logs)
        return [
            sys.executable,
            "-I",
            "-S",
            RANK_PROCESS,
            self.connections.address,
            *options,
            "--",
            *program,
        ]

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the launcher; return the exit code of the job: 0 if launcher and ranks succeeded.

        Otherwise it is that of the first rank that failed, or else of the launcher; 128 + N for
        signal N.
        """
        secret = {SECRET: self.connections.secret}
        try:
            with self.signals.recorded(*TO_LAUNCHER):  # those for the ranks: see run_job
                with started(
                    command, {**environ, **secret}, self._boxes, stdin=self.stdin
                ) as self._launcher:
                    return self._verdict(self._wait()) or int(bool(self._boxes.lost))
        finally:
            self.connections.close()

    def _wait(self) -> int:
        """Handle signals and reports until the launcher ends; return its status (-N for signal N).

        It then waits for the last reports of the ranks, for 5 s or, after a failure, 0.5 s.
        """
        begun = time.monotonic()
        while self._launcher.poll() is None:
            self.connections.listen(0.1)
            for number in self.signals.pending():
                self._pass(number)
            self.failures.print_settled()
            self._boxes.show(SHOWN_WITHIN)
            self._end_if_late(begun)
            self._end_if_stuck()
            self._end_if_idle()
            self._report_missing(begun)
            self._end_if_mpi_does_not_start()
        status = self._launcher.returncode
        until = time.monotonic() + (LAST_REPORTS if status == 0 else AFTER_FAILURE)
        while len(self.ended) < self.ranks and time.monotonic() < until:
            self.connections.listen(0.1)
        self._boxes.wait()
        return status

    # -- signals, and jobs that do not end by themselves ------------------------------------------

    def _pass(self, number: int) -> None:
        """Forward a received signal: SIGUSR1 and SIGUSR2 to the ranks, others to the launcher.

        A Ctrl-C is not forwarded if the terminal has sent it to the launcher too.
        """
        if number in TO_RANKS:
            self.connections.send(number)
            return
        if not by_terminal(number):
            self._launcher.send_signal(number)
        self.interrupted = self.interrupted or number
        self._failed_since = self._failed_since or time.monotonic()
        if self.kill_wait is not None:  # finish in about half of the time until SIGKILL
            self._patience = min(PATIENCE, self.kill_wait / 4)
            self._step = min(STEP, self.kill_wait / 10)

    def _end_if_stuck(self) -> None:
        """End the job if the launcher still runs some time after a failure or a signal to end.

        The ranks get SIGTERM, then SIGKILL; then the launcher gets both.
        """
        if self._failed_since is None:
            return
        if time.monotonic() > self._failed_since + CAUSE_WITHIN:
            self._report()
        if time.monotonic() < self._failed_since + self._patience + self._steps * self._step:
            return
        if not self._steps and self._patience:
            say(f"the launcher has not ended the job within {self._patience:g} s: ending it")
        acts = (
            lambda: self.connections.send(signal.SIGTERM),
            lambda: self.connections.send(signal.SIGKILL),
            self._launcher.terminate,
            self._launcher.kill,
        )
        acts[min(self._steps, len(acts) - 1)]()
        self._steps += 1

    def _end_if_late(self, begun: float) -> None:
        """End the job once, `limit` seconds after `begun`; how its ranks end then is no news."""
        if self.limit is None or self.late or time.monotonic() < begun + self.limit:
            return
        self.late = self._reported = self._boxes.told = True
        self._patience, self._failed_since = 0.0, time.monotonic()

    def _end_if_idle(self) -> None:
        """End the launcher if it does not end by itself after all ranks succeeded."""
        if self._succeeded_since is None:
            return
        if time.monotonic() < self._succeeded_since + ENDS_WITHIN + self._steps * STEP:
            return
        if not self._steps:
            say(f"all ranks succeeded {ENDS_WITHIN:g} s ago: ending the launcher")
        (self._launcher.kill if self._steps else self._launcher.terminate)()
        self._steps += 1

    def _report_missing(self, begun: float) -> None:
        """Print once, 60 s after `begun`, how many ranks have started, if some have not."""
        if self._reported_missing or time.monotonic() < begun + STARTED_WITHIN:
            return
        self._reported_missing = True
        if len(self.connections.known) < self.ranks:
            say(f"{len(self.connections.known)} of {self.ranks} ranks have started: waiting")

    def _end_if_mpi_does_not_start(self) -> None:
        """End the job if no rank is left to enter MPI_Init, but some do not return from it."""
        if (
            self._failed_since is not None
            or time.monotonic() < self.connections.last_mpi_report + self.start_timeout
        ):
            return
        ranks = self.connections.known.values()
        starting = sorted(rank.number for rank in ranks if rank.mpi == STARTING)
        absent = [rank for rank in self.ended if not rank.mpi]
        entered = sum(bool(rank.mpi) for rank in ranks)
        if starting and entered + len(absent) == self.ranks:
            self._stuck_at_start = self._reported = self._boxes.told = True
            self._patience, self._failed_since = 0.0, time.monotonic()
            others = ", ".join(f"rank {rank.number}" for rank in absent[1:4])
            why = f"{absent[0]} before MPI_Init{others and f', as {others}'}; " if absent else ""
            say(
                f"{why}{len(starting)} of {self.ranks} ranks ({listed(starting)}) have been in "
                f"MPI_Init for {self.start_timeout:g} s (--start-timeout): ending the job"
            )

    @property
    def never_started(self) -> bool:
        """Whether MPI_Init failed: no rank returned from it, and it hung or a rank failed in it.

        That rank is the first that failed.  False if a signal, such as Ctrl-C, ended the job, or if
        a rank ended well without it: then the program is at fault.
        """
        ranks = self.connections.known.values()
        through = any(rank.mpi == STARTED or rank.succeeded for rank in ranks)
        failed = self._failed()
        stuck = self._stuck_at_start or bool(failed and failed[0].mpi == STARTING)
        return stuck and not through and not self.interrupted

    # -- the exit code ----------------------------------------------------------------------------

    def _end(self, rank: RankState) -> None:
        self.ended.append(rank)
        if not rank.succeeded:
            self._failed_since = self._failed_since or time.monotonic()
            if rank.status != LOST:
                self._report()
        elif len(self.ended) == self.ranks and not self._failed():
            self._succeeded_since = time.monotonic()

    def _report(self, last: bool = False) -> None:
        """Print once which rank failed first.

        If a rank reported an exception, this is printed at the end only (`last`).  A rank with an
        exit status is preferred to one that was lost.
        """
        failed = self._failed()
        cause = self.failures.cause(self.connections.known.values())
        if self._reported or not (last if cause is not None else failed):
            return
        self._reported = True
        self._told_why = cause is not None
        self.failures.print()
        cause = cause or failed[0]
        number = cause.number
        self.told = str(cause)
        self._boxes.told = self._told_why or failed[0].status != LOST
        self._boxes.show()
        # The name is that of rank_process.py, which imports nothing of this package.
        log = f"; its log: {self.logs}/rank-{number:05d}.log" if self.logs else ""
        say(f"{cause}{log}")

    def _code(self, first: RankState) -> int:
        """Return the exit code of a job whose first failed rank is `first`; 1 for an exception.

        A rank of MPICH ends by SIGTERM after an exception: see ``MpiBackend.abort``.
        """
        cause = self.failures.cause(self.connections.known.values())
        if self.interrupted or cause is None:
            return first.code
        if isinstance(cause, RankState):
            return cause.code
        told = any(failure.number == first.number for failure in self.failures.known)
        return 1 if cause.kind != INTERRUPT and (told or not cause.follows) else first.code

    def _failed(self) -> list[RankState]:
        failed = [rank for rank in self.ended if not rank.succeeded]
        return sorted(failed, key=lambda rank: rank.status == LOST)

    def _verdict(self, status: int) -> int:
        """Return the exit code of the job, given the launcher's `status`.

        It is that of the first rank that failed; else that of the launcher, or 1 if a rank has not
        reported its end.
        """
        self.failures.print()
        if self._stuck_at_start or self.late:
            return 1
        self._report(last=True)
        failed = self._failed()
        first = next((rank for rank in self.ended if not rank.succeeded), None)
        # Lost ranks have been ended together by the launcher; any other may have ended the rest.
        if first and first is not failed[0] and not self._told_why | (first.lost & failed[0].lost):
            say(f"before that {first}")
        codes = [rank for rank in failed if isinstance(rank.status, int) and rank.status > 0]
        other = next((rank for rank in codes if rank.status != failed[0].status), None)
        if other is not None and not self._told_why:
            say(f"and {other}")  # perhaps the cause: a rank that it ended may have reported first
        if failed and (failed[0].status != LOST or status == 0):
            return self._code(failed[0])
        if self._succeeded_since is not None and self._steps:
            return 0  # only the launcher did not end by itself
        if status:
            return status if status > 0 else 128 - status
        absent = sorted(set(range(self.ranks)) - {rank.number for rank in self.ended})
        if not absent:
            return 0
        say(
            f"the launcher ended with exit code 0, but of {self.ranks} ranks {listed(absent)} did "
            "not report: never started, or unable to reach this host"
        )
        return 1


def listed(numbers: Sequence[int]) -> str:
    """Return the first ranks as a comma-separated list, with an ellipsis if there are more."""
    return ", ".join(map(str, numbers[:8])) + ", …" * (len(numbers) > 8)
