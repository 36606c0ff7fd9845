"""Memory that queued work still reads or writes: it must outlive that."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..device.base import Event


class InFlight:
    """Keeps memory until its work is over, and waits for that when it is dropped itself."""

    def __init__(self) -> None:
        self._held: list[tuple[Event, Any]] = []

    def hold(self, event: Event, memory: Any) -> None:
        """Keep memory until an event is over; forget that of earlier ones."""
        self._held = [pair for pair in self._held if not pair[0].done()]
        self._held.append((event, memory))

    def __del__(self) -> None:
        for event, _ in self._held:
            with suppress(Exception):  # the driver may have been shut down with the interpreter
                event.synchronize()
