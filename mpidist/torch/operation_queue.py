"""The operations of a group, one after another: blocking ones, and the queue of the others.

A blocking operation runs in the caller's thread.  One with ``async_op=True`` is queued: whoever
waits for it performs it, with those before it; a thread performs it if nobody waits for it soon, or
if its future is asked for, which C++ can wait for.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..communicator.communicator import Communicator
from ..engine.call_site import begun_here
from ..errors import MpidistError
from . import framework
from .messages import Messages
from .work import BLOCKING, THREADS, Act, Member, Work, backend_error, recorded, uncompiled

_distributed_c10d = torch._C._distributed_c10d
_GIVEN_TO_GRAPHS = _distributed_c10d._allow_inflight_collective_as_graph_input
_UNSET_TIMEOUT = timedelta(milliseconds=-1)  # in c10d's options
_POLL_SECONDS = 5e-4  # between polls of messages while another operation is waited for
_LOOK_SECONDS = 1e-4, 2e-3  # shortest and longest, between looks for what nobody waits for
_QUIET_LOOKS = 6  # without a new operation: then the thread is for others
_FOREVER = 10 * 365 * 86400.0


def limit(timeout: timedelta) -> float | None:
    """Return the seconds of a timeout of c10d; None if it is none, or as good as none."""
    seconds = timeout.total_seconds()
    return seconds if 0 < seconds < _FOREVER else None


class Queued(Work):
    """The Work of a queued operation, with its number among those of the group."""

    def __init__(self, queue: OperationQueue, name: str, number: int, outputs: Sequence[Tensor]):
        super().__init__(outputs)
        self._queue, self.name, self.number = queue, name, number
        self._event: threading.Event | None = None  # once a thread waits that does not perform it

    def record(self, error: BaseException | None = None) -> Any:
        settles = super().record(error)
        if self._event is not None:
            self._event.set()
        return settles

    def event(self) -> threading.Event:
        """Return an event that is set at the end of the operation."""
        with self._lock:
            if self._event is None:
                self._event = threading.Event()
                if self.ended:
                    self._event.set()
        return self._event

    @uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.ended:
            seconds = timeout.total_seconds()
            if not self._queue.await_work(self, seconds if seconds > 0 else None):
                what = self._queue.what(self.name, self.number)
                late = f"Timed out waiting {seconds * 1000:.0f}ms for its end"
                raise dist.DistBackendError(f"{what}: {late}")
        return super().wait()

    @uncompiled
    def get_future(self) -> Any:
        future = super().get_future()
        if not self.ended:  # C++ may wait for it, which performs nothing
            self._queue.hasten(self)
        return future


class OperationQueue:
    """The operations of a group, which run in order, each with a deadline.

    `messages` make progress while an operation is waited for.
    """

    # Almost always the thread that queues an operation waits for it soon; going to another thread
    # and back takes 30 to 100 µs, so it performs what it waits for:
    #
    #   caller   queue 1, 2, 3 … wait(2): performs 1, 2 … computes ………………………… wait(3)
    #   server       looks            looks, gives way       looks   looks: performs 3
    #
    # A server performs what it has seen at its last look, unless a thread waits for it.  Its looks
    # become rarer while it finds nothing to do, since each takes Python's lock; but where nobody
    # waited for the last operation, it is woken up for the next.

    def __init__(self, comm: Communicator, member: Member, messages: Messages):
        self.comm, self._member, self._messages = comm, member, messages
        self.sequence = 0  # number of the last operation, from 1
        self.seconds: float | None = None  # deadline of each operation without one of its own
        # Held by the thread that performs an operation: PyTorch's callers may be several threads,
        # and a communicator serves one.
        self.performing = threading.RLock()
        self.block: list[Work] | None = None  # works of the coalesced block that has begun
        self._newest = 0  # number of the last queued operation
        self._operations: deque[tuple[Queued, Act, float | None]] = deque()  # not begun
        self.queued = 0  # operations with async_op=True that have not ended
        self._waiting = 0  # threads that perform, or are about to perform, what they wait for
        self._served = False  # by a thread of THREADS
        self._hastened = 0  # up to this number, operations are performed at once
        # Nobody waited for the last operation, so the server performed it: wake it for the next.
        self._last_was_served = False
        self._hints: queue.SimpleQueue[None] = queue.SimpleQueue()  # for the server: look
        self._counting = threading.Lock()  # for these numbers
        self._side_streams: dict[torch.device, Any] = {}  # of operations with async_op=True

    def what(self, name: str, number: int) -> str:
        """Return the description of an operation in messages of errors."""
        return self._member.what(f"{name} #{number}")

    def run(
        self,
        name: str,
        act: Act,
        outputs: Sequence[Tensor],
        opts: Any,
        inputs: Sequence[Tensor] = (),
    ) -> Work:
        """Run an operation, the function `act`, and return its Work.

        While operations are queued, blocking ones are queued behind them.  `inputs` are needed only
        if there may be no `outputs`: to find the operation's GPU.
        """
        self.sequence += 1
        seconds = self.seconds
        if opts.timeout != _UNSET_TIMEOUT:
            seconds = limit(opts.timeout) or seconds
        if torch.autograd._profiler_enabled():
            act = recorded(name, act, opts.asyncOp)
        # Nothing is before it: it need not be queued, and costs no other thread.
        if not opts.asyncOp and not self.queued:
            with self.performing:
                error = self._attempt(name, self.sequence, act, seconds)
            if error is not None:
                raise error
            return BLOCKING
        work = Queued(self, name, self.sequence, outputs)
        for x in (*outputs, *inputs):
            if framework.is_on_gpu(x):
                act = framework.on_side_stream(act, x, self._side_streams)
                break
        if self.comm.debug:
            act = begun_here(act)
        with self._counting:
            self.queued += 1
            self._newest = work.number
            self._operations.append((work, act, seconds))
        self.noted(work)
        if not self._served:
            self._have_served()
        elif self._last_was_served and self._hints.empty():
            self._hints.put(None)
        if _GIVEN_TO_GRAPHS():
            for x in outputs:  # for wait_tensor(x) in a graph, as C++ does for its own groups
                _distributed_c10d._register_work(x, work)
        return work

    def noted(self, work: Any) -> Any:
        """Add a work to the coalesced block, if one has begun, and return it."""
        if self.block is not None:
            self.block.append(work)
        return work

    def _attempt(
        self, name: str, number: int, act: Act, seconds: float | None
    ) -> BaseException | None:
        """Perform an operation with a deadline; return its error, None if it succeeded."""
        comm = self.comm
        try:
            if seconds is not self.seconds:
                comm.timeout = seconds
            act()
        except MpidistError as error:
            return backend_error(error, self.what(name, number), seconds)
        except BaseException as error:
            return error
        finally:
            if seconds is not self.seconds:
                comm.timeout = self.seconds
        return None

    def _have_served(self) -> None:
        """Have a thread serve the queued operations, if none does."""
        with self._counting:
            if self._served or not self._operations:
                return
            self._served = True
        THREADS.start(self._serve)

    def _serve(self) -> None:
        """Perform the queued operations for which nobody waits soon.

        Return when another thread serves, or when none is queued, and none has come for
        `_QUIET_LOOKS` (6) looks or Python ends.
        """
        pause = _LOOK_SECONDS[0]
        seen = 0  # number of the newest operation at the last look
        quiet = 0  # looks, one after another, that found no newer operation
        while True:
            try:
                self._hints.get(timeout=pause)
                pause = _LOOK_SECONDS[0]
            except queue.Empty:
                pause = min(2 * pause, _LOOK_SECONDS[1])
            # What was there at the last look has had its chance: its caller does something else.
            # What is newer is left to its caller, who most likely comes soon; but not at Python's
            # exit, when nobody comes any more.
            while self._operations and not self._waiting:
                last = max(seen, self._hastened) if not THREADS.ending else math.inf
                with self.performing:
                    # A caller may have performed them meanwhile.
                    if not self._operations:
                        break
                    number = self._operations[0][0].number
                    if number > last:  # left to its caller until the next look
                        break
                    settles = self._perform_next()
                pause, self._last_was_served = _LOOK_SECONDS[0], number > self._hastened
                if settles is not None and not self._complete_and_resume(settles):
                    return  # another thread serves what was queued meanwhile
            newest = self._newest
            quiet = quiet + 1 if newest == seen else 0
            seen = newest
            if not self._operations and (quiet == _QUIET_LOOKS or THREADS.ending):
                # Under the lock, as `_have_served`: either this sees the new operation, or that
                # sees that nobody serves.
                with self._counting:
                    if not self._operations:
                        self._served = False
                        return

    def _complete_and_resume(self, future: Any) -> bool:
        """Complete a future in the serving thread; return whether this thread serves on.

        The future's callbacks may start operations and await them, so another thread serves what is
        queued meanwhile; if it still does, this one ends.
        """
        with self._counting:
            self._served = False
        self._have_served()
        THREADS.complete(future)
        with self._counting:
            if self._served:
                return False
            self._served = True
        return True

    def _perform_next(self) -> Any:
        """Perform the first queued operation; `performing` is held.

        Return its future, which is to be completed, or None.
        """
        work, act, seconds = self._operations.popleft()
        error = self._attempt(work.name, work.number, act, seconds)
        # Before it is recorded: whoever waits for it may then call a blocking operation, which is
        # not queued if it is the only one.
        with self._counting:
            self.queued -= 1
        return work.record(error)

    def hasten(self, work: Queued) -> None:
        """Have an operation, and those before it, performed at once by another thread."""
        with self._counting:
            self._hastened = max(self._hastened, work.number)
        if self._hints.empty():
            self._hints.put(None)
        self._have_served()

    def await_work(self, work: Queued, seconds: float | None) -> bool:
        """Wait for a queued operation; return False if `seconds` pass before its end."""
        # The calling thread takes over from the server: it performs the operation, and those before
        # it.  But not with a limit, which it could not keep inside an operation; nor while sends
        # and receives are pending, which may be what another rank waits for before it comes to this
        # operation; nor in a daemon thread, which Python's exit stops in the middle.
        if seconds is None and not self._messages.pending and not threading.current_thread().daemon:
            self._take_over(work)
            if work.ended:
                return True
        self.hasten(work)
        event = work.event()
        if not self._messages.pending:
            return event.wait(seconds)
        waited = 0.0
        while not event.wait(_POLL_SECONDS):
            waited += _POLL_SECONDS
            if seconds is not None and waited > seconds:
                return False
            self._messages.advance()
        return True

    def _take_over(self, work: Queued) -> None:
        """Perform the queued operations up to `work` in this thread, which waits for it."""
        with self._counting:
            self._waiting += 1  # the server gives way
        try:
            with self.performing:
                while self._operations and not work.ended:
                    first, self._last_was_served = self._operations[0][0], False
                    settles = self._perform_next()
                    if settles is not None:  # a callback may wait for what this thread does next
                        THREADS.complete_elsewhere(settles)
                    if isinstance(error := first.exception(), KeyboardInterrupt):  # of this wait
                        raise error
        finally:
            with self._counting:
                self._waiting -= 1
            # Those behind `work` that are to be performed at once: the server has left them.
            if self._hastened > work.number and self._operations:
                self._hints.put(None)

    def hasten_all(self) -> None:
        """Have all queued operations performed at once."""
        if self._operations:
            self.hasten(self._operations[-1][0])
