"""The end of a call on a GPU, for which the host waits where a job goes on after a loss."""

from __future__ import annotations

from collections.abc import Callable

from ..calls.call import Call
from ..device.base import Event
from ..engine.service import Service


class Completion:
    """Waits on the host until calls are complete, in a job that goes on when a rank is lost.

    Else work queued behind a call would go on with what was left of it, and change the weights from
    which training is to continue.  ``let_go()`` lets the streams go on that wait for a lost rank.
    """

    def __init__(self, service: Service, let_go: Callable[[], object]):
        self._sequencer, self._let_go = service.sequencer, let_go
        self._needed = service.backend.why_no_survivors() is None

    def wait(self, call: Call, event: Event) -> None:
        """Wait for the event behind a call; RankFailed if a rank is lost, or CollectiveTimeout."""
        if not self._needed:
            return
        complete, sequencer = False, self._sequencer
        try:
            complete = sequencer.engine.wait(event.done, sequencer.deadline())
        finally:
            if not complete:
                self._let_go()
        if not complete:
            raise sequencer.timed_out(call.signature, None, "on the GPU")
