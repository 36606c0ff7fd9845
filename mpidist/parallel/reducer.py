"""The reducer: sends each bucket when its gradients are ready, and waits for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from ..frameworks.base import WeakHook
from ..measure import counted
from ..trace import profiled
from .autotune import Autotune, candidates
from .bucketing import Grouping, Layout
from .stats import Clock, Stats
from .transport import TRANSPORTS, Hook, Pending, Polls, Transport

log = logging.getLogger("mpidist")


class Reducer:
    """Averages the gradients of a model over the ranks, step by step.

    A backward pass *adds* to gradients; :meth:`sync`, at the end of a step, averages them.

    Parameters
    ----------
    grouping : Grouping
        The parameters and their buckets.
    comm : Communicator
        The ranks.
    overlap : {"auto", "none", "polls", "thread"}
        See :class:`~mpidist.parallel.DDP`.
    hook : callable or None
        Communication hook; None for the exact mean.
    unused : {"skip", "zero", "error"}
        See :class:`~mpidist.parallel.DDP`.
    static : bool
        Whether every step uses the parameters that the first one uses.

    Attributes
    ----------
    comm : Communicator
        The communicator of the buckets: a split of the user's if they are sent during backward.
    enabled : bool
        Whether gradients are to be sent; False while they are accumulated.
    before_first_send : callable or None
        Called once in each step, on the rank's own thread, before anything is sent.
    active : bool
        Whether gradients are views into buckets (not needed on one rank).
    on_backward : callable or None
        Called at the first addition of a backward pass; it may set `queued`.
    queued : bool
        Whether a sync has been queued for the end of this backward pass.
    averaged : bool
        Whether the last backward pass ended with a sync, and no addition came since.
    pending : list of Pending
        The buckets that were sent in this step, in order.
    touched : ndarray of uint8
        Which gradients this rank has added to since the last sync.
    fixed : bool
        Whether parameters stay in their buckets, whatever order is observed.
    name : str
        Name of the transport: "none", "polls" or "thread".
    """

    def __init__(
        self,
        grouping: Grouping,
        comm: Communicator,
        overlap: str,
        hook: Hook | None,
        unused: str,
        static: bool = False,
    ):
        self.grouping, self.enabled, self.clock = grouping, True, Clock()
        self.before_first_send: Callable[[], object] | None = None
        self.on_backward: Callable[[], object] | None = None
        self.queued = self.averaged = False
        self.high_water, self.fixed, self.active = 0, False, comm.size > 1
        self._on_regroup: Callable[[], object] | None = None
        self.touched = np.zeros(len(grouping.named), np.uint8)
        self._unused, self._used = unused, np.zeros_like(self.touched)
        self._static, self._first = static, None  # type: bool, np.ndarray | None
        self._sparse: dict[int, Any] = dict.fromkeys(grouping.sparse)  # gradients of the last sync
        self.pending: list[Pending] = []
        self._opened, self._failed = False, ""
        # Whether no sync has followed the last forward before which no parameter had a gradient.
        self._began = False
        self._ids = {id(p) for _, p in grouping.named}
        names = candidates(comm, overlap, len(grouping.layout), grouping.on_device)
        # Buckets sent during backward must not meet the user's calls, whose order relative to them
        # may differ between ranks.
        self._owns_comm = names != ["none"] and comm.size > 1
        own = comm.split(0) if self._owns_comm else comm
        assert own is not None
        self.comm: Communicator = own
        grouping.make(self.comm, grouping.layout)
        self.hook, self._warned = hook, False
        self._transports: dict[str, Transport] = {}
        self.transport = self._use(names[0])
        self._handles = self._listen()
        self._silent = {i for i, handle in enumerate(self._handles) if handle is None}
        self._autotune = Autotune(grouping, self.comm, names, any(self._handles))

    def _use(self, name: str) -> Transport:
        if name not in self._transports:
            self._transports[name] = TRANSPORTS[name](self.hook)
        self.name = name
        return self._transports[name]

    def _listen(self) -> list[Any]:
        """Register a callback for additions to each gradient; return functions to remove them.

        For a parameter whose library has no such callbacks the list has None.
        """
        listen, added = self.grouping.framework.on_gradient, WeakHook(self.added)
        return [listen(p, partial(added, i)) for i, (_, p) in enumerate(self.grouping.named)]

    def close(self) -> None:
        """Remove all callbacks, and free the communicator of the buckets; collective."""
        for remove in filter(None, self._handles):
            remove()
        self._handles = []
        if self._owns_comm and self.comm.broken is None:
            self.comm.free()

    # -- a step ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Prepare a forward: replace gradients that are None by zeroed views of their buckets.

        A DDP calls it before each forward; the first one of a step starts the clock.
        """
        self.clock.begin()
        self.queued = False  # also if the last backward has failed
        if self.active and not self.pending:
            bare = [bucket.attach() for bucket in self.grouping.buckets]
            self._began = self._began or sum(bare) == len(self.grouping.where)
            for i in self._sparse:
                if self.grouping.named[i][1].grad is None:
                    self._sparse[i] = None  # free its memory
            if not self._warned and any(bare) and self.touched.any():
                self._warned = True
                log.warning(
                    "rank %d: gradients were computed and forgotten without sync_gradients()",
                    self.comm.rank,
                )

    def added(self, index: int) -> None:
        """Record an addition to the gradient of parameter `index`, and send complete buckets."""
        self.touched[index], self.averaged = 1, False
        place, buckets = self.grouping.where.get(index), self.grouping.buckets
        if place is not None and (streams := buckets[place[0]].streams) is not None:
            streams.note()
        if not self.enabled:
            return
        if self.on_backward is not None and not self.queued:
            self.on_backward()
        if place is None:  # sparse: sent by sync()
            return
        b, k = place
        self._autotune.ready(index)
        complete = buckets[b].ready(k)
        if not self.transport.early:
            return
        began = perf_counter()
        if complete:  # in the order of the buckets, which is the same on all ranks
            while len(self.pending) < len(buckets) and buckets[len(self.pending)].complete:
                self._open()
                bucket = buckets[len(self.pending)]
                bucket.collect()
                self.pending.append(self.transport.send(bucket))
                self.high_water = max(self.high_water, len(self.pending))
        self.transport.poll()
        self.clock.within(perf_counter() - began)

    def _open(self) -> None:
        """Call ``before_first_send`` unless something was already sent in this step."""
        if not self._opened:
            self._opened = True
            if self.before_first_send is not None:
                self.before_first_send()

    def sync(self, together: bool = False) -> None:
        """Send the remaining buckets, wait for all, and prepare the next step; collective.

        Parameters
        ----------
        together : bool
            Whether buckets are in flight together instead of one after another.
        """
        if self._failed:
            raise InvalidArgument(
                f"rank {self.comm.rank}: an earlier sync_gradients() failed ({self._failed}); "
                "some gradients were sent, some not: close() this DDP and make another one"
            )
        self.clock.sync_begins()
        buckets, pending = self.grouping.buckets, self.pending
        transport = self.transport
        if together and not transport.early:
            transport = Polls(self.hook)
        with profiled("mpidist.sync_gradients"):
            try:
                self._note_set()
                self._open()
                if self.active:
                    for bucket in buckets[len(pending) :]:
                        bucket.collect()
                        pending.append(transport.send(bucket))
                        self.high_water = max(
                            self.high_water, len(pending) if transport.early else 1
                        )
                    for bucket, sent in zip(buckets, pending, strict=True):
                        sent.wait()
                        bucket.check_received()
                else:
                    for bucket in buckets:
                        if self._unused != "skip":
                            bucket.attach()
                        bucket.settle()
                if self._unused == "skip" and self.active:
                    self._take_back_unused()
                if self._sparse:
                    self._average_sparse()
                self._end_step(transport)
            except BaseException as error:
                if self.pending:
                    self._failed = f"{type(error).__name__}: {error}"
                self._opened = False
                raise

    def _note_set(self) -> None:
        """Mark in `touched` the gradients that the user set, for which no callback was called."""
        for i in np.flatnonzero(self.touched == 0).tolist():
            if i in self._sparse:
                grad = self.grouping.named[i][1].grad
                self.touched[i] = grad is not None and grad is not self._sparse[i]
                continue
            b, k = self.grouping.where[i]
            bucket = self.grouping.buckets[b]
            # Without callbacks any gradient may have been added to.
            any_grad = i in self._silent and bucket.parameters[k].grad is not None
            self.touched[i] = any_grad or bucket.was_set(k)

    def before_step(self, parameters: set[int] | None) -> None:
        """Settle what a forward has prepared and no sync has followed, before an optimizer's step.

        Gradients that were assigned are marked in `touched`.  Zeroed views to which nothing was
        added become None again: a forward without a backward, as of a model that is only evaluated,
        must not make an optimizer move its parameters.

        `parameters` are the ids of the optimizer's; None for all.
        """
        buckets, named = self.grouping.buckets, self.grouping.named
        if self.pending or not (self._began or any(bucket.lent for bucket in buckets)):
            return
        if parameters is not None and self._ids.isdisjoint(parameters):
            return
        for i in np.flatnonzero(self.touched == 0).tolist():
            p = named[i][1]
            if p.grad is None or (parameters is not None and id(p) not in parameters):
                continue
            if i in self._sparse:
                self.touched[i] = self._began and p.grad is not self._sparse[i]
                continue
            b, k = self.grouping.where[i]
            if not buckets[b].was_set(k):
                buckets[b].take_back(k)
            elif self._began:
                self.touched[i] = 1

    def _take_back_unused(self) -> None:
        """Set gradients that no rank has computed in this step to None again; collective.

        An optimizer skips those; zeros would still be moved by its momentum and weight decay.
        """
        used = self._used
        if self._first is None:
            used[...] = self.touched
            if self.comm.size > 1:
                self.comm.allreduce(used, op="max", out=used)
            self._first = self.touched.copy() if self._static else None
        elif (self._first != self.touched).any():
            names = self._names(self._first != self.touched)
            raise InvalidArgument(
                f"rank {self.comm.rank}: static_graph=True, but only one of the first step and "
                f"this one has used {names}: expected the same parameters in all steps, or "
                "static_graph=False"
            )
        for i in np.flatnonzero(used == 0).tolist():
            if i in self._sparse:
                continue
            b, k = self.grouping.where[i]
            bucket = self.grouping.buckets[b]
            # A hook may have sent here what it had left out in earlier steps.
            if self.hook is None or not bool((bucket.views[k] != 0).any()):
                bucket.take_back(k)

    def _average_sparse(self) -> None:
        """Average the sparse gradients; collective."""
        parameters = [self.grouping.named[i][1] for i in self._sparse]
        self.grouping.framework.average_sparse(self.comm, parameters, self._unused != "skip")
        self._sparse = {i: p.grad for i, p in zip(self._sparse, parameters)}

    def _end_step(self, transport: Transport) -> None:
        """Reset the buckets after a step; in the first steps, change buckets or transport."""
        buckets = self.grouping.buckets
        self.pending, self._opened, self._began = [], False, False
        for bucket in buckets:
            bucket.reset()
        traced = self.comm.traced
        if traced is None:
            self.clock.end(transport.spans)
        else:
            self.clock.end(transport.spans, traced.recorder)
        name = self._autotune.after_step(self.clock.last, self.fixed)
        if name is not None:
            self.transport = self._use(name)
        move = getattr(self.hook, "move", None)
        if move is not None and self.grouping.buckets is not buckets:
            move(buckets, self.grouping.buckets)

    # -- buckets ------------------------------------------------------------------------------

    @property
    def observed(self) -> bool:
        """Whether the buckets are final: the order of gradients is no longer observed."""
        return self.fixed or self._autotune.observed

    @property
    def settled(self) -> bool:
        """Whether buckets and transport are final, after the first steps."""
        return self._autotune.over

    def regroup(
        self, layout: Layout, algorithms: Sequence[str] | None = None, observed: bool = True
    ) -> None:
        """Replace the buckets by those of `layout`, the parameters' indices by bucket; collective.

        `algorithms` are those of the buckets' allreduces; by default they are chosen.  If
        `observed`, the layout comes from an observed order of gradients, and stays as it is.

        Raises
        ------
        InvalidArgument
            If a ZeroOptimizer has made steps with other buckets, by which its state is divided.
        """
        self.fixed = self.fixed or observed
        divided = self._on_regroup is not None and layout != self.grouping.layout
        if divided and self.clock.steps:
            made = counted(self.clock.steps, "step")
            raise InvalidArgument(
                f"rank {self.comm.rank}: the ZeroOptimizer has made {made} with other buckets "
                "than those of the checkpoint: load it into new objects"
            )
        self.grouping.make(self.comm, layout, algorithms)
        if divided and self._on_regroup is not None:
            self._on_regroup()

    @property
    def divided(self) -> bool:
        """Whether a sync leaves each rank with the mean of its shard only (ZeRO)."""
        return any(bucket.shard is not None for bucket in self.grouping.buckets)

    def fix(self, on_regroup: Callable[[], object]) -> None:
        """Keep parameters in their present buckets, and gradients in the buckets' buffers.

        Only :meth:`regroup` still changes the buckets; it then calls `on_regroup`.
        """
        self.fixed = self.active = True
        self._on_regroup = on_regroup

    def not_averaged(self) -> list[int]:
        """Return the indices of parameters whose gradient is this rank's own, not averaged."""
        named = self.grouping.named
        return [i for i in np.flatnonzero(self.touched).tolist() if named[i][1].grad is not None]

    def is_averaged(self) -> bool:
        """Return whether backward ended with a sync, and no gradient has changed since."""
        if self.averaged and self.active:
            self._note_set()
        return self.averaged and not self.touched.any()

    def use_hook(self, hook: Hook) -> None:
        """Send gradients by a communication hook from now on.

        Raises
        ------
        InvalidArgument
            If there is a hook already, a step was made without one, or a ZeroOptimizer divides the
            gradients.
        """
        if self.hook is not None or self.clock.steps or self.divided:
            reason = "has a hook" if self.hook is not None else "divides its gradients (ZeRO)"
            reason = f"has made {counted(self.clock.steps, 'step')}" if self.clock.steps else reason
            raise InvalidArgument(
                f"rank {self.comm.rank}: this DDP {reason}: expected one hook, set before the "
                "first step"
            )
        self.hook, self._transports = hook, {}
        self.transport = self._use(self.name)

    def count_as_used(self) -> None:
        """Mark all parameters as used in this step if ``unused="error"``, and none otherwise.

        It is called on a rank without a batch, which must not be reported for unused parameters.
        """
        self.touched[:] = self._unused == "error"

    def _names(self, which: np.ndarray) -> str:
        return ", ".join(self.grouping.named[i][0] for i in np.flatnonzero(which))

    def take_touched(self) -> np.ndarray:
        """Return the array `touched`, and begin a new one of zeros."""
        touched, self.touched = self.touched, np.zeros_like(self.touched)
        return touched

    def stats(self) -> Stats:
        """Return the times of the steps so far: compute, exposed and hidden communication."""
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
            trials=dict(self._autotune.times),
        )
