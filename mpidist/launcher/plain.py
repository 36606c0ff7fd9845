"""A job whose ranks are not monitored: the launcher runs alone, and Python ranks send notes."""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..communicator.launcher_notes import NOTES
from ..foreign import typed
from .boxes import SHOWN_WITHIN, Boxes
from .connections import RankState
from .failures import Failure, Failures
from .mpi import say
from .rank_process import AT_ONCE, PR_SET_PDEATHSIG, receive_note
from .watch import ENDS_WITHIN, PATIENCE, STEP, TO_LAUNCHER, TO_RANKS, Signals, by_terminal, started


@dataclass
class Note:
    """A note of a rank's program: see ``communicator/launcher_notes.py``."""

    rank: int
    host: str
    mpi: str | None = None
    failure: dict[str, str] | None = None
    exit: int | None = None


@dataclass
class PlainJob:
    """Runs a launcher without monitoring its ranks; prints the exceptions that ended ranks.

    Python ranks on this host send *notes*: that they have started, which exception ends them, or
    their exit code.

    Parameters
    ----------
    ranks : int
        Number of ranks of the job.
    signals : Signals
        Signals that this process has received already.
    """

    ranks: int
    signals: Signals = field(default_factory=Signals)

    def __post_init__(self) -> None:
        self.failures, self._boxes = Failures(self.ranks), Boxes()
        self._known: dict[int, RankState] = {}  # Python ranks of this host, in the order of notes
        self._gone: list[RankState] = []  # in the order of their ends
        self._gone_since = 0.0  # when the last of all ranks had ended
        self._steps = 0  # steps taken to end a launcher that stays
        self._interrupted = False
        self._address = f"mpidist-{secrets.token_hex(8)}"
        self._selector = selectors.DefaultSelector()
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._notes.bind(f"\0{self._address}")
        self._notes.setblocking(False)
        self._selector.register(self._notes, selectors.EVENT_READ)

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the launcher; return the exit code of the job, 128 + N for signal N."""
        environ = {**environ, NOTES: self._address}
        try:
            with self.signals.recorded(*TO_RANKS, *TO_LAUNCHER):
                with started(command, environ, self._boxes, _end_with_parent) as self._launcher:
                    return self._verdict(self._wait()) or int(bool(self._boxes.lost))
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, int):
                    os.close(key.fileobj)
            self._notes.close()
            self._selector.close()

    def _wait(self) -> int:
        """Handle signals and notes until the launcher ends; return its status (-N for signal N)."""
        self._observe(self._launcher.pid, None)
        while self._launcher.poll() is None:
            self._listen(0.2)
            for number in self.signals.pending():
                self._interrupted = self._interrupted or number in TO_LAUNCHER
                if not by_terminal(number):
                    self._launcher.send_signal(number)
            self.failures.print_settled()
            self._boxes.show(SHOWN_WITHIN)
            self._end_if_it_stays()
        self._listen(0)
        self._boxes.wait()
        return self._launcher.returncode

    # -- the ranks --------------------------------------------------------------------------------

    def _observe(self, pid: int, rank: RankState | None) -> None:
        """Have :meth:`_listen` notice the end of a process (by pidfd_open, where it exists).

        `rank` is the rank whose program it is, or None for the launcher.
        """
        with suppress(OSError, AttributeError):
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, rank)

    def _listen(self, seconds: float) -> None:
        """Wait at most `seconds` for notes and for ends of processes, and handle them."""
        ready = self._selector.select(seconds)
        for _ in range(AT_ONCE):
            if not self._read_note():
                break
        for key, _ in ready:
            if isinstance(key.fileobj, int):
                self._selector.unregister(key.fileobj)
                os.close(key.fileobj)
                if key.data is not None:
                    self._gone.append(key.data)
                    self._gone_since = time.monotonic()

    def _read_note(self) -> bool:
        """Read and handle one note of a rank, if there is one; return whether there was."""
        found = receive_note(self._notes)
        if found is None:
            return False
        pid, note = found
        with suppress(TypeError, KeyError):  # not a note
            if note:
                self._handle(pid, typed(note, Note))
        return True

    def _handle(self, pid: int, note: Note) -> None:
        if not 0 <= note.rank < self.ranks:
            return
        if note.rank not in self._known:
            self._known[note.rank] = RankState(note.rank, note.host)
            self._observe(pid, self._known[note.rank])
        if note.exit is not None:
            self._known[note.rank].status = note.exit
        if note.failure is not None:
            self._known[note.rank].status = 1
            self.failures.add(note.rank, note.host, note.failure)

    def _end_if_it_stays(self) -> None:
        """End a launcher that is still running some time after all ranks have ended.

        Open MPI's is, now and then, when one rank aborts while another ends.
        """
        if not self._gone or len(self._gone) < self.ranks:
            return
        good = all(rank.succeeded for rank in self._gone)
        within = ENDS_WITHIN if good else PATIENCE
        if time.monotonic() < self._gone_since + within + self._steps * STEP:
            return
        if not self._steps:
            say(f"all ranks ended {within:g} s ago, but the launcher still runs: ending it")
        (self._launcher.kill if self._steps else self._launcher.terminate)()
        self._steps += 1

    # -- the exit code ----------------------------------------------------------------------------

    def _verdict(self, status: int) -> int:
        """Return the exit code of the job, given the launcher's `status`; print what failed."""
        code = status if status >= 0 else 128 - status
        if self._steps:  # only the launcher did not end by itself
            code = next((r.code for r in self._known.values() if not r.succeeded), 0)
        self.failures.print()
        if code and not self._interrupted:
            self._mark_silent(code)
        left = next((rank for rank in self._known.values() if rank.status), None)
        cause = self.failures.cause(self._known.values()) or left
        if code and cause is not None:
            self._boxes.told = True
            # Ranks of other hosts cannot send notes: one of them may have been the first.
            known = len(self._known) == self.ranks
            say(str(cause) if known else str(cause).replace(" failed first: ", " failed: ", 1))
            if isinstance(cause, Failure) and not self._interrupted:
                return 1  # Intel's launcher has 255
        return code

    def _mark_silent(self, code: int) -> None:
        """Record the job's exit code as that of the first rank to end, if it has sent no exit code.

        Not if another rank has sent this code: Hydra may end the rest of the job before that rank.
        If exceptions are known, record only the code of a signal (128 + N): any other code is that
        of the abort that follows an exception.
        """
        killed = 128 < code <= 128 + signal.SIGRTMAX  # Intel's launcher has 255 for every signal
        silent = self._gone and self._gone[0].status is None
        known = self.failures.known or any(rank.status == code for rank in self._known.values())
        if silent and (killed or not known):
            self._gone[0].status = 128 - code if killed else code


def _end_with_parent() -> None:
    """Have the kernel end the launcher if ``mpidist run`` is killed; called in the new process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
