"""The signals that ``mpidist run`` receives while a job runs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

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
