"""Looks after what NCCL has queued: past its deadline, or after an error, NCCL is aborted.

A rank that waits for its stream cannot look itself, so a thread does, while anything is queued.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ...device.base import Device, Event
from ...errors import CommunicationError
from .backend import NcclBackend

SECONDS = 0.2  # between two looks
IDLE_SECONDS = 5.0  # until it is seen that there is no communicator any more


class Queued(NamedTuple):
    """A call that was queued: its end, its deadline of ``time.monotonic``, and what it is."""

    event: Event
    deadline: float | None
    what: str


class Watch:
    """What is queued on one communicator of NCCL.

    Parameters
    ----------
    backend : NcclBackend
        Which is aborted.
    broke : callable
        ``broke(reason)`` is told of it.
    """

    def __init__(self, backend: NcclBackend, broke: Callable[[str], object]):
        self._backend, self._broke = backend, broke
        self._queued: deque[Queued] = deque()
        self._lock = threading.Lock()
        self._more = threading.Event()
        # An emulated device does its work in whatever thread asks: there is none beside.
        self._thread: threading.Thread | None = None
        self._alone = backend.device.emulated

    def add(self, event: Event, deadline: float | None, what: str) -> None:
        """Note what was queued; calls end in this order."""
        with self._lock:
            self._queued.append(Queued(event, deadline, what))
        if self._alone:
            return
        self._more.set()
        if self._thread is None:
            arguments = (weakref.ref(self), self._more, self._backend.device)
            self._thread = threading.Thread(target=_serve, args=arguments, daemon=True)
            self._thread.start()

    def look(self) -> bool:
        """Look once; tell whether anything is still to be watched."""
        with self._lock:
            queued = self._queued
            while queued and queued[0].event.done():
                queued.popleft()
            if not queued:
                return False
            try:
                self._backend.check()
            except CommunicationError as error:
                self._end(str(error))
                return False
            deadline = queued[0].deadline
            if deadline is not None and time.monotonic() > deadline:
                self._backend.abort()
                self._end(
                    f"rank {self._backend.rank}: NCCL has not finished {queued[0].what} by its "
                    "deadline; aborted"
                )
            return bool(queued)

    def _end(self, reason: str) -> None:
        self._queued.clear()
        self._broke(reason)

    def finish(self) -> None:
        """Wait until nothing is queued, or it was aborted."""
        while self.look():
            time.sleep(0)


def _serve(watch: weakref.ref[Watch], more: threading.Event, device: Device) -> None:
    device.enter()  # or the first question would take memory of GPU 0, whatever GPU this rank has
    pause = threading.Event()  # which nobody sets
    while True:
        found: Any = watch()
        if found is None:
            return
        busy = found.look()
        del found
        if busy:
            pause.wait(SECONDS)
        else:
            more.clear()
            more.wait(IDLE_SECONDS)
