"""Signals of ``mpidist run``: kept until it can deal with them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

TO_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
TO_LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Those that came to this process, in their order."""

    def __init__(self) -> None:
        self._came: list[int] = []

    @contextlib.contextmanager
    def taken(self, *numbers: signal.Signals) -> Iterator[None]:
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


def signal_name(number: int) -> str:
    """Give ``9 (SIGKILL)``; real-time signals have no name."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return f"{number}"
