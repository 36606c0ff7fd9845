"""The watchdog: ends the job with a report when a rank hangs inside a native call."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from ..backends.base import Backend
from .reports import Reports

log = logging.getLogger("mpidist")
_TICK = 1.0  # seconds between polls, at most a quarter of the shortest deadline


class Watched(Protocol):
    """The attributes of a communicator's sequencer that the watchdog reads."""

    backend: Backend
    timeout: float | None
    inside: int
    reports: Reports


class Watchdog:
    """One thread per process that polls every communicator with native calls.

    A native call cannot be cancelled: the library holds the buffers.  So past the deadline the
    watchdog reports the state of the ranks and ends the job.  Polling costs the call nothing.  The
    library is told of ranks that have died: with fault tolerance it lets such a call end.
    """

    def __init__(self) -> None:
        self.before_end: Callable[[], object] = lambda: None  # called before the job is ended
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._seen: dict[int, tuple[int, float]] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, sequencer: Watched) -> None:
        """Register `sequencer`, to be polled from now on."""
        with self._lock:
            self._watched.add(sequencer)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="mpidist-watchdog", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(self._look())

    def _look(self) -> float:
        """Check every communicator once; return the seconds until the next time."""
        # A function of its own: while it sleeps, the thread must not keep a communicator alive, as
        # the variable of this loop would.
        tick = _TICK
        with self._lock:
            sequencers = list(self._watched)
        for sequencer in sequencers:
            if sequencer.inside:
                sequencer.backend.notice_losses()
            if sequencer.timeout is not None:
                tick = min(tick, sequencer.timeout / 4)
                self._check(sequencer, sequencer.timeout)
        return tick

    def _check(self, sequencer: Watched, timeout: float) -> None:
        inside = sequencer.inside
        if not inside:
            self._seen.pop(id(sequencer), None)
            return
        sequence, since = self._seen.setdefault(id(sequencer), (inside, time.monotonic()))
        if sequence != inside:
            self._seen[id(sequencer)] = (inside, time.monotonic())
        elif time.monotonic() - since > timeout:
            self._end(sequencer, inside, timeout)

    def _end(self, sequencer: Watched, sequence: int, timeout: float) -> None:
        # The thread that is in the call may be the only one that may call MPI.
        threads, board = sequencer.backend.threads, sequencer.backend.board
        operation = board.texts.get(board.fingerprint(sequence), "a native call")
        error = sequencer.reports.timed_out(
            operation, sequence, "native, which cannot be interrupted", timeout, ask=threads
        )
        sys.stderr.write(f"{error}; the job ends\n")
        sys.stderr.flush()
        self.before_end()
        if threads:
            sequencer.backend.abort(1)
        # Every launcher notices death by a signal; a mere exit leaves the other ranks hanging.
        os.kill(os.getpid(), signal.SIGKILL)


WATCHDOG = Watchdog()
