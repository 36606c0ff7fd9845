"""The watchdog: ends the job with a report when a rank hangs inside a native call."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import weakref
from typing import Protocol

from ..backends.base import Backend
from .reports import Reports

log = logging.getLogger("mpidist")
_TICK = 1.0  # seconds between polls, at most a quarter of the shortest deadline


class Watched(Protocol):
    """The members of a communicator's service that the watchdog uses.

    Attributes
    ----------
    timeout : float or None
        Seconds that a call may take.
    inside : int
        Number of the operation in whose native call this rank is; 0 outside of any.
    backend, reports : Backend, Reports
        The backend that ends the job, and the writer of the report.
    """

    timeout: float | None
    inside: int
    backend: Backend
    reports: Reports


class Watchdog:
    """One thread per process that polls every communicator with native calls.

    A native call cannot be cancelled: the library holds the buffers.  So past the deadline the
    watchdog reports the state of the ranks and ends the job.  Polling costs the call nothing.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._seen: dict[int, tuple[int, float]] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, service: Watched) -> None:
        """Register `service`, to be polled from now on."""
        with self._lock:
            self._watched.add(service)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="mpidist-watchdog", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            tick = _TICK
            with self._lock:
                services = list(self._watched)
            for service in services:
                if service.timeout is not None:
                    tick = min(tick, service.timeout / 4)
                    self._look(service, service.timeout)
            del services
            time.sleep(tick)

    def _look(self, service: Watched, timeout: float) -> None:
        inside = service.inside
        if not inside:
            self._seen.pop(id(service), None)
            return
        sequence, since = self._seen.setdefault(id(service), (inside, time.monotonic()))
        if sequence != inside:
            self._seen[id(service)] = (inside, time.monotonic())
        elif time.monotonic() - since > timeout:
            self._end(service, inside, timeout)

    def _end(self, service: Watched, sequence: int, timeout: float) -> None:
        # The thread that is in the call may be the only one that may call MPI.
        threads, board = service.backend.threads, service.backend.board
        operation = board.texts.get(board.fingerprint(sequence), "a native call")
        error = service.reports.timed_out(
            operation, sequence, "native, which cannot be interrupted", timeout, ask=threads
        )
        sys.stderr.write(f"{error}; the job ends\n")
        sys.stderr.flush()
        if threads:
            service.backend.abort(1)
        # Every launcher notices death by a signal; a mere exit leaves the other ranks hanging.
        os.kill(os.getpid(), signal.SIGKILL)


WATCHDOG = Watchdog()
