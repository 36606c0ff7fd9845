"""Transports: how a bucket is sent, blocking, polled during backward, or in a thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

from ..backends.waiting import MANNERS
from ..errors import CommunicationError, InvalidArgument
from .bucket import Bucket


class Chain:
    """A Work made of others, with computations between them.

    Parameters
    ----------
    steps : generator
        Yields each :class:`~mpidist.Work` that it began, and goes on when that has ended.
    """

    def __init__(self, steps: Iterator[Any]):
        self._steps = steps
        self._under_way: Any = None
        self._done = False
        self._advance()

    def _advance(self) -> None:
        self._under_way = next(self._steps, None)
        self._done = self._under_way is None

    def test(self) -> bool:
        """Make progress; tell whether all has ended."""
        while not self._done and self._under_way.test():
            self._advance()
        return self._done

    def poll(self) -> bool:
        """Make progress with what has begun, and begin nothing; tell whether all has ended."""
        if not self._done:
            self._under_way.test()
        return self._done

    def wait(self, **options: Any) -> None:
        """Wait for the end; options are those of :meth:`mpidist.Work.wait`, for each step."""
        while not self._done:
            self._under_way.wait(**options)
            self._advance()


def chained(steps: Callable[..., Iterator[Any]]) -> Callable[..., Chain]:
    """Make a function of a generator function: its call gives a :class:`Chain`."""

    @wraps(steps)
    def begin(*arguments: Any, **options: Any) -> Chain:
        return Chain(steps(*arguments, **options))

    return begin


class Done:
    """A Work that has ended."""

    def test(self) -> bool:
        """Tell that it has."""
        return True

    def wait(self, **options: Any) -> None:
        """Return at once."""


DONE = Done()

LOOK_SECONDS = 1.0  # between two looks whether the thread is alive

Spans = list[tuple[float, float]]


class Way(Protocol):
    """How buckets are sent.

    Attributes
    ----------
    early : bool
        Whether a bucket is begun as soon as it is complete.
    spans : list of (float, float)
        When each bucket's communication began and ended, in seconds of ``perf_counter``; what the
        owner has read it removes.
    """

    early: bool
    spans: Spans

    def start(self, bucket: Bucket) -> Any:
        """Begin to send; gives a Work."""

    def poll(self) -> None:
        """Bring forward what is under way."""


class Blocking:
    """One bucket after another, within ``sync_gradients``: nothing is hidden, nothing disturbed."""

    early = False

    def __init__(self, hook: Any):
        self._send, self.spans = sender(hook), []  # type: Any, Spans

    def start(self, bucket: Bucket) -> Any:
        """Send."""
        began = perf_counter()
        self._send(bucket)
        self.spans.append((began, perf_counter()))
        return DONE

    def poll(self) -> None:
        """Do nothing: nothing is under way."""


class Polls:
    """In the background, brought forward whenever another gradient is ready.

    When that is differs from rank to rank, and the order of collectives must not: the later steps
    of a :class:`Chain` begin when it is waited for.
    """

    early = True

    def __init__(self, hook: Any):
        self._hook, self.spans = hook, []  # type: Any, Spans
        self._active: list[_Polled] = []

    def start(self, bucket: Bucket) -> Any:
        """Begin to send."""
        work = _Polled(begin(self._hook, bucket), self.spans)
        self._active.append(work)
        return work

    def poll(self) -> None:
        """Look at everything that is under way."""
        self._active = [work for work in self._active if not work.test()]


class _Polled:
    """A Work whose time is taken."""

    def __init__(self, work: Any, spans: Spans):
        self._work, self._spans, self._began = work, spans, perf_counter()
        self._look = getattr(work, "poll", work.test)
        self._ended = False

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._spans.append((self._began, perf_counter()))

    def test(self) -> bool:
        if not self._ended and self._look():
            self._end()
        return self._ended

    def wait(self) -> None:
        self._work.wait()
        self._end()


class Thread:
    """Blocking, one after another, in a thread that has the communicator for itself."""

    early = True

    def __init__(self, hook: Any):
        self._send, self.spans = sender(hook), []  # type: Any, Spans
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, bucket: Bucket) -> Any:
        """Hand over to the thread."""
        if self._thread is None:
            arguments = (self._queue, self._send, self.spans)
            self._thread = threading.Thread(target=_serve, args=arguments, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        job = _Job(bucket, self._thread)
        self._queue.put(job)
        return job

    def poll(self) -> None:
        """Do nothing: the thread goes on by itself."""


class _Job:
    """A bucket on its way through the thread; a Work."""

    def __init__(self, bucket: Bucket, thread: threading.Thread):
        self.bucket, self._thread = bucket, thread
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def test(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        """Wait; the deadline is that of the collective in the thread."""
        while not self.ended.wait(LOOK_SECONDS):
            if not self._thread.is_alive():
                raise CommunicationError("the thread that sends gradients has ended")
        if self.error is not None:
            raise self.error


def _serve(queue: SimpleQueue, send: Callable[[Bucket], object], spans: Spans) -> None:
    MANNERS.gentle = True
    while (job := queue.get()) is not None:
        began = perf_counter()
        try:
            send(job.bucket)
        except BaseException as error:  # it is for the rank's own thread
            job.error = error
        spans.append((began, perf_counter()))
        job.ended.set()
        del job  # its bucket may die while this waits


WAYS: dict[str, Callable[[Any], Way]] = {"none": Blocking, "polls": Polls, "thread": Thread}


def begin(hook: Any, bucket: Bucket) -> Any:
    """Have a hook begin; raise InvalidArgument if it gives no Work."""
    work = hook(bucket)
    if not callable(getattr(work, "wait", None)) or not callable(getattr(work, "test", None)):
        raise InvalidArgument(
            f"rank {bucket.comm.rank}: hook gave {type(work).__name__} for bucket {bucket.index}: "
            "allowed are Works, such as bucket.comm.iallreduce() gives"
        )
    return work


def sender(hook: Any) -> Callable[[Bucket], object]:
    """Give the blocking form of a hook: its method `blocking`, or the call and a wait."""
    return getattr(hook, "blocking", None) or (lambda bucket: begin(hook, bucket).wait())


class Average:
    """The hook that is there without another: the mean over the ranks, exact."""

    lossless = True

    def __call__(self, bucket: Bucket) -> Any:
        """Begin in the background."""
        flat = bucket.flat
        return bucket.comm.iallreduce(flat, op="mean", out=flat, algorithm=bucket.algorithm)

    def blocking(self, bucket: Bucket) -> None:
        """Do it at once."""
        flat = bucket.flat
        bucket.comm.allreduce(flat, op="mean", out=flat, algorithm=bucket.algorithm)
