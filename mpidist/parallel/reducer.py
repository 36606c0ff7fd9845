"""Keeps buckets in step with backward: what is ready, launched, waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from ..frameworks.base import Weakly
from .autotune import FirstSteps, candidates
from .bucket import Bucket
from .bucketing import Grouping, Layout
from .stats import Clock, Stats
from .transport import WAYS, Polls, Way

log = logging.getLogger("mpidist")


class Reducer:
    """Averages the gradients of a model, step by step.

    Parameters
    ----------
    grouping : Grouping
        The parameters.
    comm : Communicator
        The ranks.
    overlap, hook
        See :class:`~mpidist.parallel.DDP`.
    listens : bool
        Whether to listen to gradients even if there is nobody to send them to.

    Attributes
    ----------
    comm : Communicator
        That of the buckets: one of their own where they are launched during backward.
    enabled : bool
        Whether gradients are to be sent; False while they are accumulated.
    opens : callable
        Called once in each step, on the rank's own thread, before anything is sent.
    active : bool
        Whether gradients lie in buckets; on one rank nobody needs that.
    touched : ndarray of uint8
        Which gradients this rank has added to since the last sync.
    fixed : bool
        Whether the buckets stay as they are, whatever is observed.
    """

    def __init__(self, grouping: Grouping, comm: Any, overlap: str, hook: Any, listens: bool):
        self.grouping, self.enabled, self.clock = grouping, True, Clock()
        self.opens: Any = int
        self.high_water, self.fixed, self.active = 0, False, comm.size > 1
        self._follow: Any = None
        self.touched = np.zeros(len(grouping.named), np.uint8)
        self._next, self._opened, self._failed = 0, False, ""
        names = candidates(comm, overlap, len(grouping.layout), grouping.on_device)
        # What is launched early must not meet the user's own calls, which stand anywhere in a step.
        self._owns_comm = names != ["none"] and comm.size > 1
        self.comm = comm.split(0) if self._owns_comm else comm
        grouping.make(self.comm, grouping.layout)
        self.hook, self._warned = hook, False
        self._ways: dict[str, Way] = {}
        self.way = self._use(names[0])
        self._handles = self._listen() if comm.size > 1 or listens else []
        self._learning = FirstSteps(grouping, self.comm, names, any(self._handles))

    def _use(self, name: str) -> Way:
        if name not in self._ways:
            self._ways[name] = WAYS[name](self.hook)
        self.name = name
        return self._ways[name]

    def _listen(self) -> list[Any]:
        """Have parameters tell when something was added to their gradients."""
        listen, added = self.grouping.framework.on_gradient, Weakly(self.added)
        return [listen(p, partial(added, i)) for i, (_, p) in enumerate(self.grouping.named)]

    def close(self) -> None:
        """Listen no more, and give back the communicator that was made for this; collective."""
        for remove in filter(None, self._handles):
            remove()
        self._handles = []
        if self._owns_comm and self.comm.broken is None:
            self.comm.free()

    # -- a step ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before forward: gradients that were forgotten become zeros in their buckets."""
        self.clock.begin()
        if self.active and self._next == 0:
            bare = [bucket.attach() for bucket in self.grouping.buckets]
            if not self._warned and any(bare) and self.touched.any():
                self._warned = True
                log.warning(
                    "rank %d: gradients were computed and forgotten without sync_gradients(): "
                    "the replicas will differ unless all ranks skipped the step",
                    self.comm.rank,
                )

    def added(self, index: int) -> None:
        """Something was added to the gradient of parameter `index`."""
        self.touched[index] = 1
        b, k = self.grouping.where[index]
        lane = self.grouping.buckets[b].lane
        if lane is not None:
            lane.note()
        if not self.enabled:
            return
        self._learning.ready(index)
        complete = self.grouping.buckets[b].ready(k, self.comm.rank)
        if not self.way.early:
            return
        began = perf_counter()
        if complete:
            while self._next < len(self.grouping.buckets) and self._is_complete():
                self._launch(self.way)
        self.way.poll()
        self.clock.within(perf_counter() - began)

    def _is_complete(self) -> bool:
        return self.grouping.buckets[self._next].complete

    def _launch(self, way: Way) -> None:
        self.open()
        self.grouping.buckets[self._next].launch(way.start, self.comm.rank)
        self._next += 1
        self.high_water = max(self.high_water, self._next if way.early else 1)

    def open(self) -> None:
        """Begin the communication of a step, if it has not begun."""
        if not self._opened:
            self._opened = True
            self.opens()

    def sync(self, together: bool = False) -> None:
        """Send what was not sent yet, and wait for all; then be ready for the next step.

        With `together`, buckets are in flight together instead of one after another.
        """
        if self._failed:
            raise InvalidArgument(
                f"rank {self.comm.rank}: a sync_gradients() failed before ({self._failed}); "
                "some gradients were sent, some not: close() this DDP and make another one"
            )
        self.clock.sync_begins()
        try:
            self._sync(together)
        except BaseException as error:
            if self._next:
                self._failed = f"{type(error).__name__}: {error}"
            self._opened = False
            raise

    def _sync(self, together: bool) -> None:
        way = Polls(self.hook) if together and not self.way.early else self.way
        buckets = self.grouping.buckets
        self._note_touched(buckets)
        self.open()
        if self.active:
            for _ in range(self._next, len(buckets)):
                self._launch(way)
            for bucket in buckets:
                bucket.wait(self.comm.rank)
        else:
            for bucket in buckets:
                bucket.settle(self.comm.rank)
        self._next, self._opened = 0, False
        for bucket in buckets:
            bucket.reset()
        self.clock.end(way.spans)
        name = self._learning.after(self.clock.last, self.fixed)
        if name is not None:
            self.way = self._use(name)
        if self.grouping.buckets is not buckets and hasattr(self.hook, "move"):
            self.hook.move(buckets, self.grouping.buckets)

    def _note_touched(self, buckets: Sequence[Bucket]) -> None:
        """Count gradients that were assigned, as nothing announces those."""
        for bucket in buckets[self._next :]:
            chosen = self.grouping.layout[bucket.index]
            self.touched[[chosen[k] for k in bucket.assigned()]] = 1

    # -- buckets ------------------------------------------------------------------------------

    @property
    def observed(self) -> bool:
        """Whether the buckets are those that they will be."""
        return self.fixed or self._learning.observed

    @property
    def settled(self) -> bool:
        """Whether buckets and the way of sending stay as they are."""
        return self._learning.over

    def regroup(
        self, layout: Layout, algorithms: Sequence[str] | None = None, observed: bool = True
    ) -> None:
        """Use these buckets from now on, if `observed` whatever is observed; collective.

        Raises
        ------
        InvalidArgument
            If there is an optimizer with a state for other buckets.
        """
        self.fixed = self.fixed or observed
        follows = self._follow is not None and layout != self.grouping.layout
        if follows and self.clock.steps:
            raise InvalidArgument(
                f"rank {self.comm.rank}: the ZeroOptimizer has made {self.clock.steps} steps with "
                "other buckets than those of the checkpoint: load it into new objects"
            )
        self.grouping.make(self.comm, layout, algorithms)
        if follows:
            self._follow()

    @property
    def divided(self) -> bool:
        """Whether each rank has the mean of its slices only after a sync."""
        return getattr(self.hook, "divides", False)

    def lock(self, follow: Callable[[], object]) -> None:
        """Keep these buckets, and gradients in them; if they change yet, `follow` is called."""
        self.fixed = self.active = True
        self._follow = follow

    def send_by(self, hook: Any) -> None:
        """Send by another hook."""
        self.hook, self._ways = hook, {}
        self.way = self._use(self.name)

    def stats(self) -> Stats:
        """Give where the time went."""
        clock, steps = self.clock, max(self.clock.steps, 1)
        return Stats(
            steps=clock.steps,
            compute=clock.compute / steps,
            exposed=clock.exposed / steps,
            communication=clock.communication / steps,
            hidden=clock.hidden / steps,
            bytes=self.grouping.nbytes,
            copies=self.grouping.copies,
            in_flight_high_water=self.high_water,
            overlap=self.name,
            trials=dict(self._learning.times),
        )
