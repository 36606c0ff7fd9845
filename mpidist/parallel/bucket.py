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
from .gradient import ADDED, EMPTY, Gradient


class BucketStreams:
    """The GPU streams that compute, send and read the gradients of one bucket.

    The host waits for none of them.  Where all are one stream, as in most models, no event is
    recorded: an addition to a gradient costs one entry in a set.  ``stream()`` returns the current
    stream of the library that computes the gradients.
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
    """A rank's shard of a bucket: the only part whose mean it receives, with ZeRO."""

    mine: slice  # elements in the bucket's flat buffer
    counts: tuple[int, ...]  # of each rank's shard
    algorithm: str  # of the bucket's reduce_scatter


Allocate = Callable[[Any, int, Communicator], Any]


class Bucket:
    """Parameters of one dtype and device, and the flat buffer that holds their gradients.

    Parameters
    ----------
    index : int
        Number of the bucket; buckets are sent in this order on every rank.
    gradients : sequence of Gradient
        Records of the gradients, in the order of the buffer.
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
    missing : int
        Number of gradients that may still be added to in this step; 0: the bucket is complete.
    streams : BucketStreams or None
        The GPU streams that compute and send the gradients; None if these are on the host.
    """

    def __init__(
        self,
        index: int,
        gradients: Sequence[Gradient],
        framework: Framework,
        comm: Communicator,
        allocate: Allocate,
    ):
        self.index, self.comm, self.framework = index, comm, framework
        self.gradients = list(gradients)
        self.names = [gradient.name for gradient in gradients]
        self.parameters = [gradient.parameter for gradient in gradients]
        self.shapes = [tuple(p.data.shape) for p in self.parameters]
        sizes = [math.prod(shape) for shape in self.shapes]
        self.starts = tuple(sum(sizes[:k]) for k in range(len(sizes) + 1))
        self.algorithm, self.copies = "auto", 0
        self.shard: Shard | None = None
        self.missing = len(gradients) - sum(gradient.final for gradient in gradients)
        self._allocate: Allocate | None = allocate
        p = self.parameters[0]
        on_host = framework.stream(p) is None
        self.streams = None if on_host else BucketStreams(partial(framework.stream, p))  # type: ignore[arg-type]
        self._flat: Any = None
        for gradient in gradients:
            gradient.bucket, gradient.view = index, None

    def _make(self) -> None:
        assert self._allocate is not None
        self._flat = self._allocate(self.parameters[0], self.starts[-1], self.comm)
        # It refers to the owner of the bucket: without the cycle memory is freed as soon as the
        # bucket is dropped.
        self._allocate = None
        for start, gradient in zip(self.starts, self.gradients):
            gradient.view = self.framework.view(self._flat, start, gradient.parameter)

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
        return [gradient.view for gradient in self.gradients]

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer in bytes."""
        return int(self.flat.nbytes)

    # -- gradients and the buffer -----------------------------------------------------------------

    def adopt(self) -> None:
        """Allocate the buffer, and move existing gradients into it as views; collective."""
        for gradient, view in zip(self.gradients, self.views, strict=True):
            p = gradient.parameter
            if p.grad is not None and tuple(p.grad.shape) == tuple(view.shape):
                self._copy(gradient, p.grad)
                p.grad = view

    def attach(self) -> bool:
        """Give parameters without a gradient their zeroed views, so that backward adds in place.

        Return whether one of these gradients had been added to, and was set to None unaveraged.
        """
        bare = [gradient for gradient in self.gradients if gradient.parameter.grad is None]
        if not bare:
            return False
        flat, lost = self.flat, False
        if len(bare) == len(self.gradients):  # the usual case: one fill instead of many small ones
            flat[...] = 0
        for gradient in bare:
            if len(bare) < len(self.gradients):
                gradient.view[...] = 0
            lost = lost or gradient.state is ADDED
            gradient.parameter.grad, gradient.state = gradient.view, EMPTY
        return lost

    def collect(self) -> None:
        """Copy all gradients into the buffer before it is sent; missing ones become zeros.

        Raises
        ------
        InvalidArgument
            If a gradient does not have its parameter's shape.
        """
        if self.streams is not None:
            self.streams.before_send()
        if self._flat is None:
            self._make()
        # What is sent is the buffer, so each gradient must be its part of it:
        #
        #     flat        |   weight   | bias |   weight   |
        #     grad is       the view     None   another array, which the user or a loss assigned
        #     so            nothing      zeros  copied, and replaced by the view
        for gradient in self.gradients:
            grad, view = gradient.parameter.grad, gradient.view
            if grad is view:
                continue
            if grad is None:
                view[...] = 0
            else:
                self._check_shape(gradient, grad)
                self._copy(gradient, grad)
                self.copies += 1
            gradient.parameter.grad = view

    def _copy(self, gradient: Gradient, grad: Any) -> None:
        try:
            self.framework.copy(gradient.view, grad)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"rank {self.comm.rank}: the gradient of {gradient.name} is {error}"
            ) from None

    def check_shapes(self) -> None:
        """Raise InvalidArgument if a gradient does not have its parameter's shape.

        For a single rank, which sends nothing and so does not call :meth:`collect`.
        """
        for gradient in self.gradients:
            if gradient.parameter.grad is not None:
                self._check_shape(gradient, gradient.parameter.grad)

    def _check_shape(self, gradient: Gradient, grad: Any) -> None:
        shape = tuple(gradient.parameter.data.shape)
        if tuple(grad.shape) != shape:
            raise InvalidArgument(
                f"rank {self.comm.rank}: the gradient of {gradient.name} has shape "
                f"{tuple(grad.shape)}, the parameter has {shape}"
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
        for gradient in self.gradients:
            if gradient.parameter.grad is not gradient.view:
                raise InvalidArgument(
                    f"rank {self.comm.rank}: the gradient of {gradient.name} was replaced between "
                    "backward and sync_gradients(), when it had been sent; allowed with "
                    "overlap='none' only"
                )
