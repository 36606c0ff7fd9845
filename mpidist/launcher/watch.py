"""Watches a launch: hears from every rank how it ended, so that the exit code tells the truth."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..communicator.launcher_notes import STARTED, STARTING
from ..errors import LaunchError
from .connections import LOST, WORD, Lines, Rank
from .mpi import say
from .processes import end_processes

TO_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
TO_LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Those that came to this process, in their order."""

    def __init__(self) -> None:
        self._came: list[int] = []

    @contextlib.contextmanager
    def recorded(self, *numbers: signal.Signals) -> Iterator[None]:
        """Take these signals, instead of what happens without."""
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        self._came.append(number)

    def arrived(self) -> Iterator[int]:
        """Give those that came since the last time."""
        while self._came:
            yield self._came.pop(0)


def by_terminal(number: int) -> bool:
    """Tell whether a signal is Ctrl-C at our terminal, which sends it to the launcher as well.

    Who sent it is not known (it may have come to any thread); where this process group is in the
    foreground, it is taken to be the terminal.
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


MEMBER = str(Path(__file__).with_name("rank_process.py"))
PATIENCE = 8.0  # seconds that the launcher has to end a job of which a rank was lost
STEP = 3.0  # seconds between asking, killing the ranks, and killing the launcher
UNTIL_TOLD = 1.0  # seconds in which the rank that is the cause may report, after one is lost
LAST_WORDS, AFTER_FAILURE = 5.0, 0.5  # seconds in which reports come after the launcher's end
ENDS_WITHIN = 30.0  # seconds that the launcher has to end after all ranks finished well
STARTED_WITHIN = 60.0  # seconds after which it is told that ranks are missing
MPI_WITHIN = 120.0  # seconds that MPI_Init may take, from when the last rank has entered it


@dataclass
class Watch:
    """Runs a launcher, and hears of its ranks.

    Parameters
    ----------
    ranks : int
        How many there are to be.
    label : bool
        Whether each line that a rank writes begins with its number.
    logs : str, optional
        Folder for one file a rank.
    haste : float, optional
        Seconds from a SIGTERM until whoever sent it kills this process: SLURM's KillWait.
    signals : Signals
        Those that came already.
    start_timeout : float
        Seconds that MPI may take to start, from when all ranks have begun to start it.
    """

    ranks: int
    label: bool = False
    logs: str | None = None
    haste: float | None = None
    signals: Signals = field(default_factory=Signals)
    start_timeout: float = MPI_WITHIN
    ended: list[Rank] = field(default_factory=list)  # in the order of their ends

    def __post_init__(self) -> None:
        self.lines = Lines(self.ranks, self._end)
        self._patience, self._step = PATIENCE, STEP
        self._bad_since: float | None = None
        self._good_since: float | None = None
        self._told = self._told_missing = self._stuck_at_start = self._interrupted = False
        self._done = 0  # steps taken to end a job of which a rank was lost

    def command(self, program: Sequence[str]) -> list[str]:
        """Give what a launcher has to start in place of `program`."""
        options = ["label"] * self.label + [f"logs={self.logs}"] * bool(self.logs)
        return [sys.executable, "-I", "-S", MEMBER, self.lines.where, *options, "--", *program]

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the launcher; give 0 if it and every rank ended well, else why not as a number."""
        with self.signals.recorded(*TO_RANKS, *TO_LAUNCHER):
            try:
                self._launcher = subprocess.Popen(command, env={**environ, WORD: self.lines.word})
            except OSError as error:
                raise LaunchError(f"{command[0]} cannot be started: {error}") from error
            try:
                return self._verdict(self._wait())
            finally:
                if self._launcher.poll() is None:  # an error here must not leave ranks behind
                    end_processes(self._launcher)
                self.lines.close()

    def _wait(self) -> int:
        """Wait for the end of the launcher, and the last words of the ranks."""
        begun = time.monotonic()
        while self._launcher.poll() is None:
            self.lines.listen(0.1)
            for number in self.signals.arrived():
                self._pass(number)
            self._end_if_stuck()
            self._end_if_idle()
            self._tell_if_missing(begun)
            self._end_if_mpi_does_not_start()
        status = self._launcher.returncode
        until = time.monotonic() + (LAST_WORDS if status == 0 else AFTER_FAILURE)
        while len(self.ended) < self.ranks and time.monotonic() < until:
            self.lines.listen(0.1)
        return status

    # -- signals, and ends that have to be helped -----------------------------------------------

    def _pass(self, number: int) -> None:
        """Hand a signal on: that of a terminal (Ctrl-C) the launcher has got as well."""
        if number in TO_RANKS:
            self.lines.send(number)
            return
        if not by_terminal(number):
            self._launcher.send_signal(number)
        self._interrupted = True
        self._bad_since = self._bad_since or time.monotonic()
        if self.haste is not None:  # to be through before all is killed, in about half the time
            self._patience = min(PATIENCE, self.haste / 4)
            self._step = min(STEP, self.haste / 10)

    def _end_if_stuck(self) -> None:
        """End the job if the launcher does not, after a rank was lost."""
        if self._bad_since is None:
            return
        if time.monotonic() > self._bad_since + UNTIL_TOLD:
            self._tell()
        if time.monotonic() < self._bad_since + self._patience + self._done * self._step:
            return
        if not self._done and not self._stuck_at_start:
            say(f"the launcher has not ended the job within {self._patience:g} s: ending it")
        acts = (
            lambda: self.lines.send(signal.SIGTERM),
            lambda: self.lines.send(signal.SIGKILL),
            self._launcher.terminate,
            self._launcher.kill,
        )
        acts[min(self._done, len(acts) - 1)]()
        self._done += 1

    def _end_if_idle(self) -> None:
        """End the launcher if it does not end by itself, after all ranks finished well."""
        if self._good_since is None:
            return
        if time.monotonic() < self._good_since + ENDS_WITHIN + self._done * STEP:
            return
        if not self._done:
            say(f"all ranks finished well {ENDS_WITHIN:g} s ago: ending the launcher")
        (self._launcher.kill if self._done else self._launcher.terminate)()
        self._done += 1

    def _tell_if_missing(self, begun: float) -> None:
        """Say once that ranks have not started; it may be their node, or SLURM, that is slow."""
        if self._told_missing or time.monotonic() < begun + STARTED_WITHIN:
            return
        self._told_missing = True
        if len(self.lines.known) < self.ranks:
            say(f"{len(self.lines.known)} of {self.ranks} ranks have started: waiting")

    def _end_if_mpi_does_not_start(self) -> None:
        """End the job if every rank is in MPI_Init or through it, and some do not come through."""
        if self._bad_since is not None or time.monotonic() < self.lines.noted + self.start_timeout:
            return
        ranks = self.lines.known.values()
        starting = sorted(rank.number for rank in ranks if rank.mpi == STARTING)
        if starting and len(ranks) == self.ranks and all(rank.mpi for rank in ranks):
            self._stuck_at_start = True
            self._patience, self._bad_since = 0.0, time.monotonic()
            say(
                f"{len(starting)} of {self.ranks} ranks ({listed(starting)}) have been in MPI_Init "
                f"for {self.start_timeout:g} s (--start-timeout): ending the job"
            )

    @property
    def never_started(self) -> bool:
        """Whether the job failed in MPI_Init: the first rank was in it, and none came through."""
        through = any(rank.mpi == STARTED for rank in self.lines.known.values())
        bad = self._bad()
        stuck = self._stuck_at_start or bool(bad and bad[0].mpi == STARTING)
        return stuck and not through and not self._interrupted

    # -- how it went ----------------------------------------------------------------------------

    def _end(self, rank: Rank) -> None:
        self.ended.append(rank)
        if not rank.good:
            self._bad_since = self._bad_since or time.monotonic()
            if rank.status != LOST:
                self._tell()
        elif len(self.ended) == self.ranks and not self._bad():
            self._good_since = time.monotonic()

    def _tell(self) -> None:
        """Name the first rank that ended badly, once; rather one that says how than a lost one."""
        bad = self._bad()
        if bad and not self._told:
            self._told = True
            say(str(bad[0]))

    def _bad(self) -> list[Rank]:
        bad = [rank for rank in self.ended if not rank.good]
        return sorted(bad, key=lambda rank: rank.status == LOST)

    def _verdict(self, status: int) -> int:
        """Give the exit code: that of the first rank that ended badly, if any did."""
        if self._stuck_at_start:
            return 1
        self._tell()
        bad = self._bad()
        first = next((rank for rank in self.ended if not rank.good), None)
        if first is not None and first is not bad[0]:
            say(f"before that {first}")  # the others may have ended because of it
        codes = [rank for rank in bad if isinstance(rank.status, int) and rank.status > 0]
        other = next((rank for rank in codes if rank.status != bad[0].status), None)
        if other is not None:
            say(f"and {other}")  # perhaps the cause: a rank that it ended may have told first
        if bad and (bad[0].status != LOST or status == 0):
            return bad[0].code
        if self._good_since is not None and self._done:
            return 0  # it was only the launcher that did not end
        if status:
            return status if status > 0 else 128 - status
        absent = sorted(set(range(self.ranks)) - {rank.number for rank in self.ended})
        if not absent:
            return 0
        say(
            f"the launcher ended with exit code 0, but how rank {listed(absent)} of {self.ranks} "
            "ended is not known: it was never started, or could not reach this host"
        )
        return 1


def listed(numbers: Sequence[int]) -> str:
    """Name the first of these ranks."""
    return ", ".join(map(str, numbers[:8])) + ", …" * (len(numbers) > 8)
