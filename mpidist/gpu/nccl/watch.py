"""A watchdog for NCCL: aborts NCCL when a queued call misses its deadline or an error occurs.

A rank that waits for its stream cannot poll, so a thread does, while any call is queued.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ...device.base import Device, Event
from ...errors import CollectiveTimeout, CommunicationError, InvalidArgument
from .backend import NcclBackend

SECONDS = 0.2  # between two polls
IDLE_SECONDS = 5.0  # after which an idle thread notices that its communicator is gone


class Queued(NamedTuple):
    """A queued call: its name in errors is `what`, and `event` is complete at its end.

    The `deadline` is a time of ``time.monotonic``; ``check()`` raises if another rank has queued a
    different call.
    """

    event: Event
    deadline: float | None
    what: str
    check: Callable[[], object] | None = None


class NcclWatch:
    """The watchdog of one NCCL communicator, with its queued calls.

    ``broke(error, what)`` is called after NCCL was aborted, with the name of the call.
    """

    def __init__(self, backend: NcclBackend, broke: Callable[[CommunicationError, str], object]):
        self._backend, self._broke = backend, broke
        self._queued: deque[Queued] = deque()
        self._lock = threading.Lock()
        self._added = threading.Event()
        # An emulated device works in the thread that polls it, which must be the user's.
        self._thread: threading.Thread | None = None
        self._without_thread = backend.device.emulated

    def add(self, queued: Queued) -> None:
        """Add a queued call; calls complete in the order in which they are added."""
        with self._lock:
            self._queued.append(queued)
        if self._without_thread:
            return
        self._added.set()
        if self._thread is None:
            arguments = (weakref.ref(self), self._added, self._backend.device)
            self._thread = threading.Thread(target=_poll_until_gone, args=arguments, daemon=True)
            self._thread.start()

    def poll(self) -> bool:
        """Check the queued calls once; return whether any is still queued.

        NCCL is aborted if it reports an error, or if the first queued call missed its deadline or
        is another one than on other ranks.
        """
        with self._lock:
            queued = self._queued
            while queued and queued[0].event.done():
                queued.popleft()
            if not queued:
                return False
            first = queued[0]
            try:
                self._backend.check()
                if first.check is not None:
                    first.check()
                if first.deadline is not None and time.monotonic() > first.deadline:
                    raise CollectiveTimeout(
                        f"rank {self._backend.rank}: NCCL has not finished {first.what} by its "
                        "deadline; aborted",
                        collective=first.what.split()[0],
                    )
            except InvalidArgument:  # NCCL was aborted by whoever waits for the first call
                queued.clear()
            except CommunicationError as error:
                self._backend.abort()
                queued.clear()
                self._broke(error, first.what)
            return bool(queued)

    def finish(self) -> None:
        """Wait until no call is queued: all are complete, or NCCL was aborted."""
        while self.poll():
            time.sleep(0)


def _poll_until_gone(watch: weakref.ref[NcclWatch], added: threading.Event, device: Device) -> None:
    device.enter()  # else the first poll would take memory of GPU 0, whatever GPU this rank uses
    pause = threading.Event()  # never set: its wait is an interruptible sleep
    while True:
        found: Any = watch()
        if found is None:
            return
        busy = found.poll()
        del found
        if busy:
            pause.wait(SECONDS)
        else:
            added.clear()
            added.wait(IDLE_SECONDS)
