"""Works of torch.distributed: the operations of a process group, as its callers see them."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from ..backends.waiting import POLLING
from ..errors import CollectiveTimeout, CommunicationError, InvalidArgument, MpidistError

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    CAN_SKIP = True
except ImportError:  # an older PyTorch
    CAN_SKIP = False

Act = Callable[[], object]
_ENDING_SECONDS = 1.0  # for an operation that is pending when Python ends


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method marked so that torch.compile skips it and all that it calls.

    Unlike ``torch.compiler.disable``, this makes no wrapper around the method, which C++ may call,
    and does not import the compiler.
    """
    if CAN_SKIP:
        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(method.__code__, strategy)
    return method


class Member:
    """The caller's rank in a group, as errors name it."""

    def __init__(self, rank: int, size: int, name: str):
        self.rank, self.size, self.name = rank, size, name

    def wrong(self, message: str) -> InvalidArgument:
        """Return an InvalidArgument error with this rank and `message`."""
        return InvalidArgument(f"rank {self.rank}: {message}")

    def what(self, call: str) -> str:
        """Return the description of a call in messages of errors."""
        return f"rank {self.rank}: {call} of group {self.name!r}"


def milliseconds(seconds: float | None) -> str:
    """Return a deadline in messages of errors."""
    return "forever" if seconds is None else f"{seconds * 1000:.0f}"


def backend_error(error: MpidistError, what: str, seconds: float | None) -> BaseException:
    """Return torch.distributed's exception for a communication error; other errors as they are.

    `what` describes the operation in the message, and `seconds` was its deadline.
    """
    if not isinstance(error, CommunicationError):
        return error
    waited = f" Timed out waiting {milliseconds(seconds)}ms:"
    late = waited if isinstance(error, CollectiveTimeout) else ""
    made = dist.DistBackendError(f"{what}:{late} {error}")
    made.__cause__ = error
    return made


def recorded(name: str, act: Act, mark: bool) -> Act:
    """Return `act`, so that a running profiler records it as ``mpidist:name``.

    With `mark` the call is recorded, not the operation: the thread of the group is not profiled.
    """
    if mark:
        with record_function(f"mpidist:{name}"):
            return act

    def run() -> None:
        with record_function(f"mpidist:{name}"):
            act()

    return run


class Threads:
    """Threads of all groups: they perform queued operations, and run callbacks of futures.

    PyTorch aborts the process if Python exits while a thread runs PyTorch's code.  So Python's exit
    waits for these threads: for a second for queued operations, and for all callbacks.
    """

    # Callbacks may wait for other operations and their callbacks (PowerSGD's do).  In the thread
    # that performs operations, or in one thread for all callbacks, they would wait for themselves:
    # so a task gets a thread that is idle, or else a new one.

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: queue.SimpleQueue[Act] = queue.SimpleQueue()
        self._idle = self._busy = self._callbacks = 0
        self.ending = self._ended = False  # Python's exit has begun; and waits for nothing any more
        atexit.register(self._end)

    def start(self, task: Act) -> None:
        """Call a function in another thread."""
        with self._changed:
            if self._ended:
                return
            self._busy += 1
            grow = not self._idle
            self._idle -= not grow
        self._tasks.put(task)
        if grow:
            threading.Thread(target=self._run, name="mpidist-group", daemon=True).start()

    def _run(self) -> None:
        POLLING.gentle = True
        while True:
            self._tasks.get()()
            with self._changed:
                self._busy -= 1
                self._idle += 1
                self._changed.notify_all()

    def complete(self, future: Any) -> None:
        """Complete a future, and run its callbacks, in this thread."""
        with self._changed:
            if self._ended:
                return
            self._callbacks += 1
        try:
            future.set_result(None)
        finally:
            with self._changed:
                self._callbacks -= 1
                self._changed.notify_all()

    def complete_elsewhere(self, future: Any) -> None:
        """Have a future completed by another thread; None is no future."""
        if future is not None:
            self.start(lambda: self.complete(future))

    def _end(self) -> None:
        with self._changed:
            self.ending = True
            self._changed.wait_for(lambda: not self._busy, _ENDING_SECONDS)
            self._changed.wait_for(lambda: not self._callbacks)
            self._ended = True


THREADS = Threads()


class Work(dist.Work):
    """The Work of an operation of a process group, which PyTorch's callers get."""

    def __init__(self, outputs: Sequence[Tensor]):
        super().__init__()
        self.outputs = outputs  # the tensors that hold the result
        self.ended = False  # whether the operation has ended, with or without an error
        self._error: BaseException | None = None
        self._future: Any = None
        self._settles: Any = None
        self._lock = threading.RLock()

    def record(self, error: BaseException | None = None) -> Any:
        """Record that the operation has ended; return its future, to be completed, or None."""
        with self._lock:
            if self.ended:
                return None
            self._error, self.ended = error, True
            return self._settles

    def _raise(self) -> None:
        error = self.exception()
        if error is not None:
            raise error

    def _unwrap(self, _: Any) -> list[Tensor]:
        self._raise()
        return list(self.outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the operation has ended; raise its error, or return True.

        Sends and receives of the group make progress meanwhile.  A `timeout` of 0 waits as long as
        the operation's own deadline allows.
        """
        self._raise()
        return True

    def synchronize(self) -> None:
        """Wait until the operation has ended."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        return self.ended

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result, after the end of the operation."""
        self.wait()
        return list(self.outputs)

    @uncompiled
    def get_future(self) -> Any:
        """Return a future of the tensors that hold the result."""
        with self._lock:
            if self._future is None:
                # An error set on a future crashes DDP; one that is raised in a callback does not.
                gpus = {x.device: None for x in self.outputs if x.is_cuda}
                self._settles = torch.futures.Future(devices=list(gpus))
                self._future = self._settles.then(self._unwrap)
                if self.ended:
                    self._settles.set_result(None)
        return self._future


BLOCKING = Work([])  # of all blocking calls: PyTorch's functions do not return it
BLOCKING.record()


class Coalesced(Work):
    """The Work of all operations of a coalesced block; its error is the first one of theirs."""

    def __init__(self, works: Sequence[Work]):
        super().__init__([x for work in works for x in work.outputs])
        self._works = works

    @uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        until, first = time.monotonic() + timeout.total_seconds(), None
        for work in self._works:
            left = timedelta(seconds=max(until - time.monotonic(), 1e-3)) if timeout else timeout
            try:
                work.wait(left)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    @uncompiled
    def get_future(self) -> Any:
        if self._future is None:
            super().get_future()
            every = torch.futures.collect_all([work.get_future() for work in self._works])
            every.add_done_callback(lambda _: self._settles.set_result(None))
        return self._future
