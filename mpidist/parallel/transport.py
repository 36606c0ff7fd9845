"""Transports of buckets: blocking, polled during backward, or in a thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

from ..backends.waiting import POLLING
from ..errors import CommunicationError, InvalidArgument
from ..trace import profiled
from .bucket import Bucket


class Pending(Protocol):
    """A pending operation, such as a :class:`~mpidist.Work`."""

    def test(self) -> bool:
        """Make progress; return whether the operation is complete."""

    def wait(self) -> object:
        """Wait until the operation is complete."""


Hook = Callable[[Bucket], Any]
"""A communication hook: starts to send a bucket, and returns a :class:`~mpidist.Work`."""


class Chain:
    """A Work that runs several others in sequence, with computation between them.

    The generator starts each :class:`~mpidist.Work` and yields it; it is resumed when that is
    complete.
    """

    def __init__(self, steps: Iterator[Any]):
        self._steps = steps
        self._pending: Any = None
        self._done = False
        self._advance()

    def _advance(self) -> None:
        self._pending = next(self._steps, None)
        self._done = self._pending is None

    def test(self) -> bool:
        """Make progress, and start the next step; return whether all steps are complete."""
        while not self._done and self._pending.test():
            self._advance()
        return self._done

    def poll(self) -> bool:
        """Poll the pending step, without starting the next; return whether all steps are complete.

        Ranks poll at different moments, while collectives must start in the same order on all.
        """
        if not self._done:
            self._pending.test()
        return self._done

    def wait(self, **options: Any) -> None:
        """Wait for all steps; options are passed to :meth:`mpidist.Work.wait` of each."""
        while not self._done:
            self._pending.wait(**options)
            self._advance()


def chained(steps: Callable[..., Iterator[Any]]) -> Callable[..., Chain]:
    """Decorate a generator function so that a call returns a :class:`Chain`."""

    @wraps(steps)
    def start(*arguments: Any, **options: Any) -> Chain:
        return Chain(steps(*arguments, **options))

    return start


class Done:
    """A pending operation that is already complete."""

    def test(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


DONE = Done()

ALIVE_SECONDS = 1.0  # between two checks whether the thread is alive

Spans = list[tuple[float, float]]


def average(bucket: Bucket) -> Any:
    """Start to average a bucket over the ranks, and return the Work.

    With ZeRO this rank receives the mean of its shard only.
    """
    flat, shard = bucket.flat, bucket.shard
    if shard is None:
        return bucket.comm.iallreduce(flat, op="mean", out=flat, algorithm=bucket.algorithm)
    return bucket.comm.ireduce_scatter(
        flat, op="mean", out=flat[shard.mine], counts=shard.counts, algorithm=shard.algorithm
    )


def add_span(spans: Spans, bucket: Bucket, began: float) -> None:
    """Record that the communication of a bucket lasted from `began` to now.

    It is added to `spans`, and to the trace if one is being recorded.
    """
    ended, traced = perf_counter(), bucket.comm.traced
    spans.append((began, ended))
    if traced is not None:
        about = {"bytes": bucket.flat.nbytes, "names": ", ".join(bucket.names)}
        traced.add((f"bucket {bucket.index}", "bucket", began, ended, "DDP buckets", about))


def start(hook: Hook, bucket: Bucket) -> Any:
    """Call a hook on a bucket; return its Work, or raise InvalidArgument if it returns none."""
    work = hook(bucket)
    if not callable(getattr(work, "wait", None)) or not callable(getattr(work, "test", None)):
        raise InvalidArgument(
            f"rank {bucket.comm.rank}: hook returned {type(work).__name__} for bucket "
            f"{bucket.index}: expected a Work, such as bucket.comm.iallreduce() returns"
        )
    return work


class Transport(Protocol):
    """Protocol of the transports: how complete buckets are sent and averaged over the ranks."""

    early: bool  # whether a bucket is sent during backward, as soon as it is complete
    # Start and end of the communication of each bucket, by ``perf_counter``; the caller empties it
    # at the end of each step.
    spans: Spans

    def send(self, bucket: Bucket) -> Pending:
        """Send a bucket, or start to; return the operation, pending or complete."""

    def poll(self) -> None:
        """Make progress with the pending buckets."""


class Blocking:
    """Sends one bucket after another within ``sync_gradients()``, hidden by no computation."""

    early = False

    def __init__(self, hook: Hook | None):
        self._hook, self.spans = hook, []  # type: Hook | None, Spans

    def send(self, bucket: Bucket) -> Pending:
        """Send a bucket, wait until it is averaged, and return a complete operation."""
        began = perf_counter()
        with profiled(f"mpidist.bucket {bucket.index}"):
            if self._hook is not None:
                start(self._hook, bucket).wait()
            elif (shard := bucket.shard) is None:
                flat = bucket.flat
                bucket.comm.allreduce(flat, op="mean", out=flat, algorithm=bucket.algorithm)
            else:
                flat = bucket.flat
                bucket.comm.reduce_scatter(
                    flat,
                    op="mean",
                    out=flat[shard.mine],
                    counts=shard.counts,
                    algorithm=shard.algorithm,
                )
        add_span(self.spans, bucket, began)
        return DONE

    def poll(self) -> None:
        """Do nothing: no bucket is pending."""


class Polls:
    """Sends buckets in the background, polled each time another gradient is ready."""

    early = True

    def __init__(self, hook: Hook | None):
        self._hook, self.spans = hook or average, []  # type: Hook, Spans
        self._pending: list[_Polled] = []

    def send(self, bucket: Bucket) -> Pending:
        """Start to send a bucket, and return the pending operation."""
        with profiled(f"mpidist.bucket {bucket.index} begins"):
            polled = _Polled(start(self._hook, bucket), self.spans, bucket)
        self._pending.append(polled)
        return polled

    def poll(self) -> None:
        """Poll every pending bucket."""
        self._pending = [polled for polled in self._pending if not polled.test()]


class _Polled:
    """A pending bucket; the span of its communication is recorded at its end."""

    def __init__(self, work: Any, spans: Spans, bucket: Bucket):
        self._work, self._spans, self._began = work, spans, perf_counter()
        self._bucket = bucket
        # Where there is poll(), test() would also start the next collective of a chain: at another
        # moment on each rank, and so in another order.  wait() starts it, on all in one order.
        self._poll = getattr(work, "poll", work.test)
        self._complete = False

    def _end(self) -> None:
        if not self._complete:
            self._complete = True
            add_span(self._spans, self._bucket, self._began)

    def test(self) -> bool:
        if not self._complete and self._poll():
            self._end()
        return self._complete

    def wait(self) -> None:
        self._work.wait()
        self._end()


class Thread:
    """Sends one bucket after another in a thread, by the communicator of the buckets."""

    early = True

    def __init__(self, hook: Hook | None):
        self._blocking = Blocking(hook)
        self.spans = self._blocking.spans
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, bucket: Bucket) -> Pending:
        """Queue a bucket for the thread, and return the pending operation."""
        if self._thread is None:
            # Without a reference to this object: when it is deleted, the thread is told to end.
            arguments = (self._queue, self._blocking)
            self._thread = threading.Thread(target=_serve, args=arguments, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        job = _Job(bucket, self._thread)
        self._queue.put(job)
        return job

    def poll(self) -> None:
        """Do nothing: the thread makes progress by itself."""


class _Job:
    """A bucket that is queued for the sending thread."""

    def __init__(self, bucket: Bucket, thread: threading.Thread):
        self.bucket, self._thread = bucket, thread
        self.complete = threading.Event()
        self.error: BaseException | None = None

    def test(self) -> bool:
        return self.complete.is_set()

    def wait(self) -> None:
        """Wait until the thread has sent the bucket; raise the error that occurred there.

        No deadline is needed here: the thread's collective has one.
        """
        while not self.complete.wait(ALIVE_SECONDS):
            if not self._thread.is_alive():
                raise CommunicationError("the thread that sends gradients has ended")
        if self.error is not None:
            raise self.error


def _serve(queue: SimpleQueue, blocking: Blocking) -> None:
    """Send the queued buckets, in the thread of a :class:`Thread`, until None is queued."""
    # Backward computes meanwhile: a thread that yields in its waits would keep Python's lock.
    POLLING.gentle = True
    while (job := queue.get()) is not None:
        try:
            blocking.send(job.bucket)
        except BaseException as error:  # it is raised on the rank's own thread
            job.error = error
        job.complete.set()
        del job  # the bucket may be freed while the thread waits for the next one


TRANSPORTS: dict[str, Callable[[Hook | None], Transport]] = {
    "none": Blocking,
    "polls": Polls,
    "thread": Thread,
}
