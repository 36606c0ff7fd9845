"""Order between the streams that gradients come on, and the one that they are sent on."""

from __future__ import annotations

from collections.abc import Callable

from ..device.find import find_device


class Lane:
    """The streams of one bucket on a GPU.

    There is one event for each stream that gradients came on, and for most models that is the one
    they are sent on, so that there is none: nothing is done for each gradient but noting a number.

    Parameters
    ----------
    stream : callable
        ``stream()`` gives the current stream of the library that computes the gradients.
    """

    def __init__(self, stream: Callable[[], int]):
        self._stream = stream
        self._event = find_device().event()
        self._came: set[int] = set()
        self._sent: int | None = None

    def note(self) -> None:
        """Note on which stream something was added to a gradient."""
        self._came.add(self._stream())

    def enter(self) -> None:
        """Have the current stream wait for the gradients: the bucket is sent on it."""
        here = self._stream()
        for stream in self._came - {here}:
            self._event.record(stream)
            self._event.block(here)
        self._came.clear()
        self._sent = here

    def leave(self) -> None:
        """Have the current stream wait for what came: who reads gradients does so on it."""
        here = self._stream()
        if self._sent is not None and self._sent != here:
            self._event.record(self._sent)
            self._event.block(here)
        self._sent = None
