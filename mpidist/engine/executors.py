"""The executors of host arrays: the library's own collectives, and algorithms over messages.

The executors in shared memory are in ``shared_memory/``, those of arrays on a GPU in ``gpu/``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..backends.base import Backend, PendingArrival, Transfer
from ..backends.executor import MESSAGES, ONCE, Executor, Use
from ..backends.program import Program, Round, library_call
from ..calls.call import Call
from ..schedule.registry import Choice
from ..selection.names import NATIVE
from ..shared_memory.host import Host
from .binding import CallBinder
from .single_copy import SingleCopy
from .staged import Staged
from .storage import HostMemory
from .symmetric import Symmetric

_REPORT_SECONDS = 1.0  # for ranks of other nodes to report a mismatch


class NativeExecutor(Executor):
    """Executor that calls the backend's own collectives, such as ``MPI_Allreduce``.

    In the background between nodes, a call starts once all ranks have announced the same one.  On
    one node the ranks compare their calls on the arrival board, so that at least one of two
    mismatched ranks raises before its call starts.
    """

    name, summary = NATIVE, "the backend's own collective"

    def __init__(self, host: Host):
        self._backend, self._mismatch = host.backend, host.mismatch
        self._waiting: deque[_Compared] = deque()  # to be started in order, the same on every rank

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        native = self._backend.native
        if native is None:
            return f"the {self._backend.name} backend has no collectives of its own"
        return native.why_not(call)

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        backend, native = self._backend, self._backend.native
        assert native is not None
        if not use.background:
            return library_call(*native.actions(call))
        before, transfer, after = native.started(call)
        compared: _Compared | None = None
        if len(backend.board.ranks) < backend.size:
            transfer = compared = _Compared(backend, self._mismatch, transfer, self._waiting)
        item = Round(tuple(before), transfer, tuple(after))
        return Program([item], interruptible=False, named=compared)

    def advance(self) -> bool:
        """Start pending native calls that all ranks have reached; return whether none remains."""
        waiting = self._waiting
        while waiting and waiting[0].arrived():
            waiting.popleft().start_call()
        return not waiting


class _Compared:
    """A background native call between nodes, started once the ranks have compared theirs."""

    def __init__(
        self,
        backend: Backend,
        mismatch: Callable[[int, str, dict[int, str]], Exception],
        call: Transfer,
        waiting: deque[_Compared],
    ):
        assert backend.roll_call is not None  # there are other nodes
        self._backend, self._roll_call = backend, backend.roll_call
        self._mismatch, self._call, self._waiting = mismatch, call, waiting
        self._sequence, self._operation, self._fingerprint = 0, "", 0
        self._arrival: PendingArrival
        self._started = False
        self._until: float | None = None  # when the others have reported their calls, or will not

    def name(self, sequence: int, operation: str, fingerprint: int) -> None:
        """Set the operation of the next run, and begin to compare it with the other ranks'."""
        self._sequence, self._operation, self._fingerprint = sequence, operation, fingerprint
        self._started, self._until = False, None
        self._arrival = self._backend.begin_arrival(sequence)

    def start(self) -> None:
        """Queue the call behind the native calls begun earlier, as on every rank."""
        self._waiting.append(self)

    def arrived(self) -> bool:
        """Return whether all ranks have reached this operation."""
        return self._arrival.test()

    def start_call(self) -> None:
        """Start the call; or, if the ranks' calls differ, report this rank's call to the others."""
        if self._arrival.alike:
            self._call.start()
            self._started = True
            return
        self._roll_call.tell(self._sequence, self._fingerprint, self._operation)
        self._until = time.monotonic() + _REPORT_SECONDS

    def test(self) -> bool:
        """Return whether the call has ended; raise if the ranks' calls differ."""
        while self._waiting and self._waiting[0].arrived():
            self._waiting.popleft().start_call()
        if self._until is not None:
            other = self._roll_call.mismatches(self._sequence, self._fingerprint)
            if other or time.monotonic() > self._until:
                raise self._mismatch(self._sequence, self._operation, other)
        return self._started and self._call.test()


class MessagesExecutor(Executor):
    """Executor of all registered algorithms, by messages of the backend.

    The first use of an array posts its messages one by one; a repeated call has persistent
    requests.
    """

    name, summary, memory = "messages", "an algorithm over messages", MESSAGES

    def __init__(self, host: Host):
        self._backend, self._arity = host.backend, host.arity
        self._binder = CallBinder(host.groups, host.pipelining)

    def why_not(self, call: Call, algorithm: Choice | str, background: bool) -> str | None:
        if isinstance(algorithm, Choice):
            return None
        return "it serves only calls that name an algorithm, such as ring"

    def agreed(self, call: Call, choice: Choice | None) -> str:
        assert choice is not None
        return f"by {choice.name}"

    def bind(self, call: Call, choice: Choice | None, use: Use = ONCE) -> Program:
        assert choice is not None
        memory, arity = HostMemory(call.dtype), choice.arity or self._arity
        return self._binder.program(self._backend, memory, call, choice, arity, use.persistent)


EXECUTORS: list[Any] = [NativeExecutor, Symmetric, Staged, SingleCopy, MessagesExecutor]
"""The executors of host arrays, in the order in which ``explain`` lists them.

Each is made from a :class:`~mpidist.shared_memory.host.Host`.
"""
