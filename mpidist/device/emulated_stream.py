"""Streams of the emulated device: lazy, so that nothing is done before someone waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Action = Callable[[], object]


class Stream:
    """What is queued, in order."""

    def __init__(self) -> None:
        self._queue: deque[Action] = deque()
        self.queued = self.done = 0

    def put(self, action: Action) -> None:
        """Queue an action."""
        self._queue.append(action)
        self.queued += 1

    def run(self, until: int) -> None:
        """Do what was queued, up to that number of actions since the beginning."""
        while self.done < until:
            action = self._queue.popleft()
            self.done += 1
            action()


class EmulatedEvent:
    """See :class:`~mpidist.device.base.Event`."""

    def __init__(self, streams: dict[int, Stream]):
        self._streams = streams
        self._mark: tuple[Stream, int] | None = None

    def record(self, stream: int) -> None:
        """Remember how much is queued."""
        found = self._streams[stream]
        self._mark = (found, found.queued)

    def synchronize(self) -> None:
        """Do what was queued before."""
        if self._mark is not None:
            self._mark[0].run(self._mark[1])

    def done(self) -> bool:
        """Tell whether it was done; asking does it, or no one who only asks would see an end."""
        self.synchronize()
        return True

    def block(self, stream: int) -> None:
        """Queue on a stream that the other one is brought forward so far."""
        if self._mark is not None:
            marked, until = self._mark
            self._streams[stream].put(lambda: marked.run(until))
