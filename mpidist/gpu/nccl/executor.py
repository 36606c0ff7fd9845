"""The executor of calls by NCCL."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ...backends.executor import MESSAGES, ONCE, Use
from ...backends.program import Program, library_call
from ...calls.call import Call
from ...engine.service import Service
from ...errors import CommunicationError
from ...schedule.registry import Choice
from ...selection.names import NCCL
from ..completion import Completion
from ..executor import GpuExecutor
from ..heap import DeviceHeap
from ..ipc import is_symmetric
from .backend import NcclBackend, Ranks
from .collectives import NcclQueue, why_not
from .schedules import NcclRounds


class Nccl(GpuExecutor):
    """Executor of NCCL's collectives, and of schedules over its messages.

    NCCL is started with the first call; if it was aborted, `service` is marked broken.
    """

    name, summary = NCCL, "NCCL's own collective, or a schedule over its messages"
    memory, ready = MESSAGES, False

    def __init__(
        self,
        unavailable: str | None,
        service: Service,
        everyone: Callable[[Any], list[Any]],
        heap: DeviceHeap,
    ):
        super().__init__(unavailable)
        self._service, self._everyone, self._heap = service, everyone, heap
        self._rounds = NcclRounds(service, heap.device)
        self._queue: NcclQueue | None = None

    @property
    def queue(self) -> NcclQueue:
        """The queue of NCCL calls, once NCCL has been started."""
        assert self._queue is not None
        return self._queue

    def make_ready(self) -> None:
        """Start NCCL before a call begins: the start itself makes collective calls."""
        backend = self._service.backend
        ranks = Ranks(backend.rank, backend.size, self._everyone)
        nccl = NcclBackend(ranks)
        self._queue = NcclQueue(nccl, self._broke, Completion(self._service, nccl.abort))
        self.ready = True

    def _broke(self, error: CommunicationError, operation: str) -> None:
        # From the watchdog's thread, which may not call MPI.
        self._service.sequencer.broke(error, operation, None, elsewhere=False)

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        """Return why NCCL cannot serve the call.

        A background call of symmetric arrays with "auto" goes through host memory.
        """
        if self.unavailable is not None:
            return self.unavailable
        if isinstance(algorithm, Choice):
            return self._rounds.why_not(call, background)
        if background and algorithm == "auto" and is_symmetric(call, self._heap):
            return "symmetric arrays go through the host in the background"
        return why_not(call)

    def depends_on(self, call: Call) -> Hashable:
        """Return the dtype, the operation, and whether all parts have one length."""
        return call.dtype, None if call.op is None else call.op.name, len(set(call.counts)) > 1

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the text that all ranks compare: the library, and the schedule if there is one."""
        return "by NCCL" if choice is None else f"by NCCL's messages, {choice.name}"

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        """Return the program that queues the call, on a separate stream if in the background."""
        queue, timeout = self.queue, self._service.sequencer.timeout
        if choice is not None:
            return self._rounds.program(call, choice, queue)
        program = library_call(lambda: queue.serve(call, timeout))
        program.queue = lambda check: queue.begin(call, timeout, check)
        return program

    def leave(self) -> None:
        """Abort NCCL, if it was started, after the loss of a rank; without communication."""
        if self._queue is not None:
            self._queue.backend.abort()

    def close(self) -> None:
        """Destroy NCCL's communicator, if it was started; collective."""
        if self._queue is not None:
            self._queue.close()
