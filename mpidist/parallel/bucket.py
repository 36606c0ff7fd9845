"""A bucket: gradients that are sent together.  Its verbs: ready, launch, wait, reset."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..communicator.communicator import Communicator
from ..device.find import find_device
from ..errors import InvalidArgument
from ..frameworks.base import Framework


class Lane:
    """The streams of one bucket on a GPU.

    There is one event for each stream that gradients came on, and for most models that is the one
    they are sent on, so that there is none: nothing is done for each gradient but noting a number.

    Parameters
    ----------
    stream : callable
        ``stream()`` gives the current stream of the library that computes the gradients.
    """

    def __init__(self, stream: Callable[[], int]):
        self._stream = stream
        self._event = find_device().event()
        self._came: set[int] = set()
        self._sent: int | None = None

    def note(self) -> None:
        """Note on which stream something was added to a gradient."""
        self._came.add(self._stream())

    def enter(self) -> None:
        """Have the current stream wait for the gradients: the bucket is sent on it."""
        here = self._stream()
        for stream in self._came - {here}:
            self._event.record(stream)
            self._event.block(here)
        self._came.clear()
        self._sent = here

    def leave(self) -> None:
        """Have the current stream wait for what came: who reads gradients does so on it."""
        here = self._stream()
        if self._sent is not None and self._sent != here:
            self._event.record(self._sent)
            self._event.block(here)
        self._sent = None


Allocate = Callable[[Any, int, Any], Any]


class Bucket:
    """Some parameters of one kind, and the flat buffer that holds their gradients.

    Parameters
    ----------
    index : int
        Its number; buckets are launched in this order on every rank.
    named : sequence of (str, parameter)
        In the order of the buffer.
    framework : Framework
        Of the parameters.
    comm : Communicator
        The ranks that its gradients are averaged over.
    allocate : callable
        ``allocate(p, count, comm)`` gives the buffer: zeros, `count` elements like those of `p`.

    Attributes
    ----------
    flat : array, 1-D
        The buffer, as communicators take it; made at its first use, then kept.
    views : list
        What the gradients are after a sync: the parts of the buffer, in the parameters' shapes.
    starts : tuple of int
        Where in the buffer each parameter's part begins, and the length of the buffer.
    algorithm : str
        Pinned for all of its messages.
    copies : int
        How many gradients had to be copied into the buffer so far.
    lane : Lane or None
        The order of streams, if the parameters are on a GPU.
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
        self.work: Any = None
        self.expected: list[int] | None = None  # how often a step adds to each gradient
        self.added = [0] * len(named)
        self.seen = self.added  # in the step before
        self._missing = 0  # additions that are still to come in this step
        self._allocate: Any = allocate
        p = self.parameters[0] if named else None
        on_host = p is None or framework.stream(p) is None
        self.lane = None if on_host else Lane(partial(framework.stream, p))  # type: ignore[arg-type]
        self._flat, self._views = None, []  # type: Any, list[Any]

    def _make(self) -> None:
        self._flat = self._allocate(self.parameters[0], self.starts[-1], self.comm)
        self._allocate = None  # who made the bucket holds it: no cycle, so memory goes at once
        pairs = zip(self.starts, self.parameters)
        self._views = [self.framework.view(self._flat, start, p) for start, p in pairs]

    @property
    def flat(self) -> Any:
        """The buffer."""
        if self._flat is None:
            self._make()
        return self._flat

    @property
    def views(self) -> list[Any]:
        """The parts of the buffer."""
        if self._flat is None:
            self._make()
        return self._views

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.flat.nbytes)

    def adopt(self) -> None:
        """Take over the gradients that there are; makes the buffer, on all ranks together."""
        for p, view in zip(self.parameters, self.views, strict=True):
            if p.grad is not None and tuple(p.grad.shape) == tuple(view.shape):
                self.framework.copy(view, p.grad)
                p.grad = view

    def attach(self) -> bool:
        """Give parameters without a gradient their zeroed views, so that backward adds in place.

        Returns
        -------
        bool
            Whether there were any.
        """
        bare = [k for k, p in enumerate(self.parameters) if p.grad is None]
        if not bare:
            return False
        views = self.views
        if len(bare) == len(views):
            self.flat[...] = 0
        for k in bare:
            if len(bare) < len(views):
                views[k][...] = 0
            self.parameters[k].grad = views[k]
        return True

    def assigned(self) -> list[int]:
        """List the places of gradients outside of the buffer: put there by hand, for instance."""
        views = self._views or [None] * len(self.parameters)
        pairs = enumerate(zip(self.parameters, views, strict=True))
        return [k for k, (p, view) in pairs if p.grad is not None and p.grad is not view]

    def expect(self, counts: Sequence[int] | None) -> None:
        """Say how often a step adds to each gradient; None if that is not known."""
        self.expected = None if counts is None else list(counts)
        self._missing = sum(self.expected or ())

    def ready(self, k: int, rank: int) -> bool:
        """Note that something was added to gradient `k`; tell whether the bucket is complete.

        Raises
        ------
        InvalidArgument
            If more is added than a step does: what was sent would not hold it.
        """
        self.added[k] += 1
        if self.expected is None:
            return False
        if self.added[k] > self.expected[k]:
            raise InvalidArgument(
                f"rank {rank}: the gradient of {self.names[k]} was added to {self.added[k]} times "
                f"since the last sync_gradients(), {self.expected[k]} are allowed, as in the first "
                "step; put all backward passes but the last of a step into no_sync(), "
                "and call sync_gradients() in a step that is given up as well"
            )
        self._missing -= 1
        return self.complete

    @property
    def complete(self) -> bool:
        """Whether every gradient is what it will be in this step; False if that is not known."""
        return self.expected is not None and self._missing == 0

    def launch(self, start: Callable[[Bucket], Any], rank: int) -> None:
        """Begin to send, with what gradients there are, and zeros for those that are None."""
        if self.lane is not None:
            self.lane.enter()
        for k, (p, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = p.grad
            if grad is view:
                continue
            if grad is None:
                view[...] = 0
            else:
                self._check(k, grad, rank)
                self.framework.copy(view, grad)
                self.copies += 1
            p.grad = view
        self.work = start(self)

    def settle(self, rank: int) -> None:
        """Do what a launch does to gradients where there is nobody to send them to."""
        self.attach()
        for k, p in enumerate(self.parameters):
            self._check(k, p.grad, rank)

    def _check(self, k: int, grad: Any, rank: int) -> None:
        if tuple(grad.shape) != self.shapes[k]:
            raise InvalidArgument(
                f"rank {rank}: the gradient of {self.names[k]} has shape {tuple(grad.shape)}, "
                f"the parameter has {self.shapes[k]}"
            )

    def wait(self, rank: int) -> None:
        """Wait until every gradient is what the ranks agreed on.

        Raises
        ------
        InvalidArgument
            If a gradient was replaced after it had been sent.
        """
        self.work.wait()
        if self.lane is not None:
            self.lane.leave()
        for name, p, view in zip(self.names, self.parameters, self.views, strict=True):
            if p.grad is not view:
                raise InvalidArgument(
                    f"rank {rank}: the gradient of {name} was replaced between backward and "
                    "sync_gradients(), when it had been sent; allowed with overlap='none' only"
                )

    def reset(self) -> None:
        """Be ready for the next step."""
        self.work = None
        self.seen, self.added = self.added, [0] * len(self.parameters)
        self._missing = sum(self.expected or ())
