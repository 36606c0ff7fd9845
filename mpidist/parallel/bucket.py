"""A bucket: gradients that are sent together, in one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..communicator.communicator import Communicator
from ..device.find import find_device
from ..errors import InvalidArgument
from ..frameworks.base import Framework


class BucketStreams:
    """The GPU streams that compute, send and read the gradients of one bucket.

    The host waits for none of them.  Where all are one stream, as in most models, no event is
    recorded: an addition to a gradient costs one entry in a set.

    Parameters
    ----------
    stream : callable
        ``stream()`` returns the current stream of the library that computes the gradients.
    """

    def __init__(self, stream: Callable[[], int]):
        self._stream = stream
        self._event = find_device().event()
        self._computing: set[int] = set()
        self._sending: int | None = None

    def note(self) -> None:
        """Record that the library's current stream adds to a gradient of the bucket."""
        self._computing.add(self._stream())

    def before_send(self) -> None:
        """Make the current stream, which is to send the bucket, wait for the gradients."""
        here = self._stream()
        for stream in self._computing - {here}:
            self._event.record(stream)
            self._event.block(here)
        self._computing.clear()
        self._sending = here

    def after_wait(self) -> None:
        """Make the current stream, which is to read the means, wait for the stream that sent."""
        here = self._stream()
        if self._sending is not None and self._sending != here:
            self._event.record(self._sending)
            self._event.block(here)
        self._sending = None


@dataclass
class Shard:
    """A rank's shard of a bucket: the only part whose mean it receives, with ZeRO.

    Attributes
    ----------
    mine : slice
        The shard's elements in the bucket's flat buffer.
    counts : tuple of int
        Number of elements of each rank's shard.
    algorithm : str
        Algorithm of the bucket's reduce_scatter.
    """

    mine: slice
    counts: tuple[int, ...]
    algorithm: str


Allocate = Callable[[Any, int, Communicator], Any]


class Bucket:
    """Parameters of one dtype and device, and the flat buffer that holds their gradients.

    A backward pass adds to a gradient once for each use of the parameter.  A gradient is final in a
    step, and the bucket complete, when the number of additions is that of an earlier step.

    Parameters
    ----------
    index : int
        Number of the bucket; buckets are sent in this order on every rank.
    named : sequence of (str, parameter)
        Names and parameters, in the order of the buffer.
    framework : Framework
        Adapter for the library of the parameters.
    comm : Communicator
        The ranks over which gradients are averaged.
    allocate : callable
        ``allocate(p, count, comm)`` returns the buffer: `count` zeros of the dtype of `p`.

    Attributes
    ----------
    flat : array, 1-D
        The buffer, as communicators take it; allocated at its first use.
    views : list
        The parts of the buffer in the shapes of the parameters; the gradients after a sync.
    starts : tuple of int
        Start of each parameter's part in the buffer, and the length of the buffer.
    algorithm : str
        Algorithm of the bucket's allreduce, the same in every step.
    shard : Shard or None
        The part whose mean this rank receives, if a ZeroOptimizer divides the bucket.
    copies : int
        Number of gradients that had to be copied into the buffer so far.
    lent : set of int
        Indices of the parameters whose gradient was None in this step and became its zeroed view.
    streams : BucketStreams or None
        The GPU streams that compute and send the gradients; None if these are on the host.
    """

    def __init__(
        self,
        index: int,
        named: Sequence[tuple[str, Any]],
        framework: Framework,
        comm: Communicator,
        allocate: Allocate,
    ):
        self.index, self.comm, self.framework = index, comm, framework
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.shapes = [tuple(p.data.shape) for p in self.parameters]
        sizes = [math.prod(shape) for shape in self.shapes]
        self.starts = tuple(sum(sizes[:k]) for k in range(len(sizes) + 1))
        self.algorithm, self.copies = "auto", 0
        self.shard: Shard | None = None
        self.lent: set[int] = set()
        self.expected: list[int] | None = None  # additions to each gradient in a step, if known
        self.added = [0] * len(named)
        self.seen = self.added  # additions in the step before
        self._missing = 0  # additions that have not happened yet in this step
        self._allocate: Allocate | None = allocate
        p = self.parameters[0] if named else None
        on_host = p is None or framework.stream(p) is None
        self.streams = None if on_host else BucketStreams(partial(framework.stream, p))  # type: ignore[arg-type]
        self._flat, self._views = None, []  # type: Any, list[Any]

    def _make(self) -> None:
        assert self._allocate is not None
        self._flat = self._allocate(self.parameters[0], self.starts[-1], self.comm)
        self._allocate = None  # it refers to the owner of the bucket: without the cycle memory is
        # freed as soon as the bucket is dropped
        pairs = zip(self.starts, self.parameters)
        self._views = [self.framework.view(self._flat, start, p) for start, p in pairs]

    @property
    def flat(self) -> Any:
        """The flat buffer that holds all gradients of the bucket."""
        if self._flat is None:
            self._make()
        return self._flat

    @property
    def views(self) -> list[Any]:
        """The parts of the buffer in the shapes of the parameters."""
        if self._flat is None:
            self._make()
        return self._views

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer in bytes."""
        return int(self.flat.nbytes)

    # -- gradients and the buffer -----------------------------------------------------------------

    def adopt(self) -> None:
        """Allocate the buffer, and move existing gradients into it as views; collective."""
        for k, (p, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if p.grad is not None and tuple(p.grad.shape) == tuple(view.shape):
                self._copy(k, p.grad)
                p.grad = view

    def attach(self) -> int:
        """Give parameters without a gradient their zeroed views, so that backward adds in place.

        Returns
        -------
        int
            The number of parameters without a gradient.
        """
        bare = [k for k, p in enumerate(self.parameters) if p.grad is None]
        if not bare:
            return 0
        views = self.views
        if len(bare) == len(views):
            self.flat[...] = 0
        for k in bare:
            if len(bare) < len(views):
                views[k][...] = 0
            self.parameters[k].grad = views[k]
        self.lent.update(bare)
        return len(bare)

    def was_set(self, k: int) -> bool:
        """Return whether the user set gradient `k`: assigned it, or changed its zeroed view."""
        grad = self.parameters[k].grad
        if grad is None:
            return False
        if not self._views or grad is not self._views[k]:
            return True
        return k in self.lent and bool((grad != 0).any())

    def take_back(self, k: int) -> None:
        """Set gradient `k`, which no rank has computed, back to None if it was None at first."""
        if k in self.lent:
            self.parameters[k].grad = None

    def collect(self) -> None:
        """Copy all gradients into the buffer before it is sent; missing ones become zeros.

        Raises
        ------
        InvalidArgument
            If a gradient does not have its parameter's shape.
        """
        if self.streams is not None:
            self.streams.before_send()
        for k, (p, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = p.grad
            if grad is view:
                continue
            if grad is None:
                view[...] = 0
                self.lent.add(k)
            else:
                self._check_shape(k, grad)
                self._copy(k, grad)
                self.copies += 1
            p.grad = view

    def _copy(self, k: int, grad: Any) -> None:
        try:
            self.framework.copy(self.views[k], grad)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"rank {self.comm.rank}: the gradient of {self.names[k]} is {error}"
            ) from None

    def settle(self) -> None:
        """Check the shapes of the gradients on a single rank, which does not call :meth:`collect`.

        Raises
        ------
        InvalidArgument
            If a gradient does not have its parameter's shape.
        """
        for k, p in enumerate(self.parameters):
            if p.grad is not None:
                self._check_shape(k, p.grad)

    def _check_shape(self, k: int, grad: Any) -> None:
        if tuple(grad.shape) != self.shapes[k]:
            raise InvalidArgument(
                f"rank {self.comm.rank}: the gradient of {self.names[k]} has shape "
                f"{tuple(grad.shape)}, the parameter has {self.shapes[k]}"
            )

    def check_received(self) -> None:
        """Check after the exchange that every gradient is still its view of the buffer.

        Raises
        ------
        InvalidArgument
            If a gradient was replaced after the bucket had been sent.
        """
        if self.streams is not None:
            self.streams.after_wait()
        for name, p, view in zip(self.names, self.parameters, self.views, strict=True):
            if p.grad is not view:
                raise InvalidArgument(
                    f"rank {self.comm.rank}: the gradient of {name} was replaced between backward "
                    "and sync_gradients(), when it had been sent; allowed with overlap='none' only"
                )

    # -- readiness --------------------------------------------------------------------------------

    def expect(self, counts: Sequence[int] | None) -> None:
        """Set the number of additions that complete each gradient in a step; None if unknown."""
        self.expected = None if counts is None else list(counts)
        self._missing = sum(self.expected or ())

    def ready(self, k: int) -> bool:
        """Count an addition to gradient `k`; return whether the bucket is complete.

        Raises
        ------
        InvalidArgument
            If the step has had more additions to gradient `k` than expected: the bucket may have
            been sent without the last one.
        """
        self.added[k] += 1
        if self.expected is None:
            return False
        if self.added[k] > self.expected[k]:
            raise InvalidArgument(
                f"rank {self.comm.rank}: the gradient of {self.names[k]} was added to "
                f"{self.added[k]} times since the last sync_gradients(), {self.expected[k]} are "
                "allowed, as in the first step; put all backward passes but the last of a step "
                "into no_sync(), and call sync_gradients() also in a step that is given up"
            )
        self._missing -= 1
        return self.complete

    @property
    def complete(self) -> bool:
        """Whether every gradient is final in this step; False if that is unknown."""
        return self.expected is not None and self._missing == 0

    def reset(self) -> None:
        """Reset the counts of additions, and `lent`, for the next step."""
        self.lent.clear()
        self.seen, self.added = self.added, [0] * len(self.parameters)
        self._missing = sum(self.expected or ())
