"""The reducer: sends each bucket when its gradients are ready, and waits for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, NoReturn

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import InvalidArgument
from ..frameworks.base import WeakHook
from ..measure import counted
from ..trace import profiled
from .autotune import Autotune, candidates
from .bucket import Bucket
from .bucketing import Grouping, Layout
from .gradient import ADDED, EMPTY, RECEIVED, SENT, Gradient
from .reproducible import Microbatches
from .stats import Clock, Stats
from .transport import DONE, TRANSPORTS, Hook, Pending, Polls, Transport

log = logging.getLogger("mpidist")


class Phase(Enum):
    """How far a step has come on this rank.

    ::

        idle ─────┐                                                  ┌─► idle
                  ├─ an addition ─► backward ─ first send, sync() ─► sent ─► averaged
        averaged ─┘                    ▲                             │ └───► failed
                                       └──── failed, nothing sent ───┘

    A sync ends as `averaged` if a backward pass ended with it: the next sync_gradients() then has
    nothing to do.  Otherwise it ends as `idle`, and the next one averages again, for the loop of
    the user may have changed gradients in place.  As this decides whether a collective call is
    made, a forward changes no phase: one rank alone may evaluate.  What a forward prepares is in
    the states of the gradients (:class:`~mpidist.parallel.gradient.Gradient`).

    Refused, by name: an addition to a gradient that is final, its replacement when it was sent,
    other buckets while some are in flight, and a sync after `failed`.
    """

    IDLE = "idle"
    BACKWARD = "backward"
    SENT = "sent"
    AVERAGED = "averaged"
    FAILED = "failed"


class Reducer:
    """Averages the gradients of a model over the ranks, step by step.

    A backward pass *adds* to gradients; :meth:`sync`, at the end of a step, averages them.
    `overlap`, `hook`, `unused` and `static` are options of :class:`~mpidist.parallel.DDP`.
    """

    def __init__(
        self,
        grouping: Grouping,
        comm: Communicator,
        overlap: str,
        hook: Hook | None,
        unused: str,
        static: bool = False,
        microbatches: Microbatches | None = None,
    ):
        self.grouping, self.clock = grouping, Clock()
        self.microbatches = microbatches
        # False while gradients are accumulated, not sent
        self.enabled = microbatches is None or microbatches.last
        self.gradients, self.phase = grouping.gradients, Phase.IDLE
        self._failure = ""  # text of the error by which the phase became FAILED
        # Called once in each step, on the rank's own thread, before anything is sent.
        self.before_first_send: Callable[[], object] | None = None
        # Called at the first addition of a backward pass; it may set `queued`: a sync is queued for
        # the end of this pass.
        self.on_backward: Callable[[], object] | None = None
        self.queued = False
        self._moments = count(1)  # numbers the first additions to gradients, over all steps
        self.high_water = 0  # most buckets that were in flight at once
        # Whether gradients are views of buckets; one rank needs none.
        self.active = comm.size > 1 or microbatches is not None
        # Called after the buckets have changed, as optimizer states are divided like them.
        self._on_regroup: Callable[[], object] | None = None
        self.unused, self._static = unused, static
        self._used = np.zeros(len(self.gradients), np.uint8)  # parameters used by some rank
        self._first: np.ndarray | None = None  # used by this rank in the first step, if static
        self.pending: list[Pending] = []  # the buckets that were sent in this step, in order
        names = candidates(comm, overlap, len(grouping.layout), grouping.on_device)
        # Buckets sent during backward must not meet the user's calls, whose order relative to them
        # may differ between ranks.
        self._owns_comm = names != ["none"] and comm.size > 1
        own = comm.split(0) if self._owns_comm else comm
        assert own is not None
        self.comm: Communicator = own
        grouping.make(self.comm, grouping.layout)
        self.hook = hook
        self._warned = False  # of gradients that were never averaged: once is enough
        self._transports: dict[str, Transport] = {}  # by name, those that were tried
        self.transport = self._use(names[0])
        self._handles = self._listen()  # functions that remove the callbacks for additions
        self._autotune = Autotune(grouping, self.comm, names)

    def _use(self, name: str) -> Transport:
        if name not in self._transports:
            self._transports[name] = TRANSPORTS[name](self.hook)
        self.name = name  # of the transport, as `overlap` names it
        return self._transports[name]

    def _listen(self) -> list[Any]:
        """Register a callback for additions to each gradient; return functions to remove them.

        A record whose library has no such callbacks says so.
        """
        listen, added = self.grouping.framework.on_gradient, WeakHook(self.added)
        # By its index: the record refers to the parameter, which holds the callback.
        handles = [listen(g.parameter, partial(added, g.index)) for g in self.gradients]
        for gradient, handle in zip(self.gradients, handles, strict=True):
            gradient.reports = handle is not None
        return handles

    def close(self) -> None:
        """Remove all callbacks, and free the communicator of the buckets; collective."""
        self._stop_listening()
        if self._owns_comm and self.comm.broken is None:
            self.comm.free()

    def abandon(self) -> None:
        """Remove all callbacks and gradients, without communication."""
        self._stop_listening()
        for gradient in self.gradients:
            gradient.parameter.grad = None

    def _stop_listening(self) -> None:
        for remove in filter(None, self._handles):
            remove()
        self._handles = []

    # -- a step ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Prepare a forward: replace gradients that are None by zeroed views of their buckets.

        A DDP calls it before each forward; the first one of a step starts the clock.
        """
        self.clock.begin()
        self.queued = False  # also if the last backward has failed
        if not self.active or self.pending:
            return
        if self.microbatches is not None:
            self._next_microbatch(self.microbatches)
        lost = sum([bucket.attach() for bucket in self.grouping.buckets])
        if self.microbatches is not None and self.phase is not Phase.BACKWARD:
            self.microbatches.note_changes(self.grouping.buckets)
        for gradient in self.grouping.sparse:
            if gradient.parameter.grad is None:
                lost += gradient.state is ADDED
                gradient.view, gradient.state = None, EMPTY  # free its memory
        if lost and not self._warned:
            self._warned = True
            log.warning(
                "rank %d: gradients were computed and forgotten without sync_gradients()",
                self.comm.rank,
            )

    @property
    def passes(self) -> int:
        """Number of backward passes of this step so far, with `microbatches`."""
        microbatches = self.microbatches
        if microbatches is None or self._is_given_up():
            return 0
        begun = self.phase in (Phase.BACKWARD, Phase.SENT)
        return microbatches.done + begun + microbatches.extra

    def _is_given_up(self) -> bool:
        """Return whether all gradients are None, as after zero_grad(): a step begins."""
        return all(gradient.parameter.grad is None for gradient in self.gradients)

    def _next_microbatch(self, microbatches: Microbatches) -> None:
        """Keep the gradients of the last backward pass; those of the last microbatch are sent."""
        if self._is_given_up():
            microbatches.begin()
            self._begin_counts()
        elif self.phase is Phase.BACKWARD and microbatches.last:
            microbatches.full = True  # no error yet: it may be the forward of an evaluation
        elif self.phase is Phase.BACKWARD:
            microbatches.keep(self.grouping.buckets)
            self._begin_counts()
            self.phase = Phase.IDLE
        self.enabled = microbatches.last

    def _begin_counts(self) -> None:
        """Begin to count the additions to each gradient."""
        for gradient in self.gradients:
            gradient.count = 0
        for bucket in self.grouping.buckets:
            bucket.missing = len(bucket.gradients)

    def added(self, index: int) -> None:
        """Record an addition to the gradient of parameter `index`, and send complete buckets."""
        gradient, buckets = self.gradients[index], self.grouping.buckets
        if gradient.final and (self.enabled or self.microbatches is None):
            self._refuse_addition(gradient)
        gradient.state = ADDED  # first: after an error no optimizer takes it for the mean
        if self.microbatches is not None:
            self.microbatches.check_full()
            if gradient.count:
                self.microbatches.check_again(gradient)
        if self.phase is Phase.IDLE or self.phase is Phase.AVERAGED:
            if self.microbatches is not None:
                self.microbatches.check_first(gradient, self.gradients)
            self.phase = Phase.BACKWARD
        bucket = None if gradient.bucket is None else buckets[gradient.bucket]
        if bucket is not None and bucket.streams is not None:
            bucket.streams.note()
        if not self.enabled:
            gradient.count += self.microbatches is not None
            return
        if self.on_backward is not None and not self.queued:
            self.on_backward()
        if bucket is None:  # sparse: sent by sync()
            return
        if not gradient.count:
            gradient.order = next(self._moments)
        gradient.count += 1
        if not gradient.expected:  # the first steps, which count how many additions there are
            return
        bucket.missing -= gradient.final
        if not self.transport.early:
            return
        began = perf_counter()
        if not bucket.missing:  # in the order of the buckets, which is the same on all ranks
            # A bucket that is complete early waits for those before it, and then goes with them::
            #
            #     complete    2    0    1
            #     sent        -    0    1 2
            while (sent := len(self.pending)) < len(buckets) and not buckets[sent].missing:
                self._open()
                buckets[sent].collect()
                self._note_sent(buckets[sent], self.transport.send(buckets[sent]))
        self.transport.poll()
        self.clock.within(perf_counter() - began)

    def _refuse_addition(self, gradient: Gradient) -> NoReturn:
        """Raise InvalidArgument, as the bucket may have been sent without this addition.

        Whether it was depends on the transport that was found to be the fastest: the count decides.
        """
        within = "" if self.enabled else ", the last time within no_sync()"
        raise InvalidArgument(
            f"rank {self.comm.rank}: the gradient of {gradient.name} was added to "
            f"{gradient.count + 1} times{within} since the last sync_gradients(), "
            f"{gradient.expected} are allowed, as in the first step; put all backward passes but "
            "the last of a step into no_sync(), and call sync_gradients() also in a step that is "
            "given up"
        )

    def _note_sent(self, bucket: Bucket, work: Pending) -> None:
        """Record that the next bucket was sent."""
        self.pending.append(work)
        self.high_water = max(self.high_water, 1 if work is DONE else len(self.pending))
        for gradient in bucket.gradients:
            gradient.state = SENT

    def _open(self) -> None:
        """Call ``before_first_send`` unless something was already sent in this step."""
        if self.phase is not Phase.SENT:
            self.phase = Phase.SENT
            if self.before_first_send is not None:
                self.before_first_send()

    def sync(self, together: bool = False) -> np.ndarray:
        """Send the remaining buckets, wait for all, and prepare the next step; collective.

        With `together` buckets are in flight together instead of one after another.  Return for
        each parameter whether this rank has used it in this step, as uint8.
        """
        if self.phase is Phase.FAILED:
            raise InvalidArgument(
                f"rank {self.comm.rank}: an earlier sync_gradients() failed ({self._failure}); "
                "some gradients were sent, some not: close() this DDP and make another one"
            )
        if self.microbatches is not None:
            self.microbatches.check_step(self.passes, "sync_gradients()")
        self.clock.sync_begins()
        buckets, pending, before = self.grouping.buckets, self.pending, self.phase
        transport = self.transport
        if together and not transport.early:
            transport = Polls(self.hook)
        with profiled("mpidist.sync_gradients"):
            try:
                # Before the rest is sent: then all gradients are `sent`, of this rank or not.
                self._find_set()
                used = self.touched
                empty = [gradient for gradient in self.gradients if gradient.state is EMPTY]
                self._open()
                if self.active:
                    for bucket in buckets[len(pending) :]:
                        bucket.collect()
                        self._note_sent(bucket, transport.send(bucket))
                    for bucket, sent in zip(buckets, pending, strict=True):
                        sent.wait()
                        bucket.check_received()
                else:
                    for bucket in buckets:
                        if self.unused != "skip":
                            bucket.attach()
                        bucket.check_shapes()
                if self.unused == "skip" and self.active:
                    self._take_back_unused(used, empty)
                if self.grouping.sparse:
                    self._average_sparse()
                self._end_step(transport)
            except BaseException as error:
                # If nothing was sent, nothing is lost: the user may mend it and sync again.
                self.phase = Phase.BACKWARD
                if self.pending:
                    self.phase, self._failure = Phase.FAILED, f"{type(error).__name__}: {error}"
                    for gradient in self.gradients:  # no optimizer may take it for the mean
                        gradient.state = ADDED
                raise
        self.phase = before if before is Phase.AVERAGED else Phase.IDLE
        return used

    def _find_set(self) -> None:
        """Find the gradients that the user set, also to None, without a call of :meth:`added`."""
        for gradient in self.gradients:
            if not gradient.own:
                if gradient.parameter.grad is None:
                    gradient.state = EMPTY
                # Without callbacks any gradient may have been added to.
                elif not gradient.reports or gradient.was_set():
                    gradient.state = ADDED

    def before_step(self, parameters: set[int] | None) -> None:
        """Undo, before an optimizer's step, what a forward has prepared and no sync has followed.

        A gradient that was assigned is this rank's own.  Zeroed views to which nothing was added
        become None again: a forward without a backward, as of a model that is only evaluated, must
        not make an optimizer move its parameters.

        `parameters` are the ids of the optimizer's; None for all.
        """
        if self.pending or not self.active:
            return
        for gradient in self.gradients:
            if gradient.state is EMPTY and (
                parameters is None or id(gradient.parameter) in parameters
            ):
                if gradient.was_set():
                    gradient.state = ADDED
                else:
                    gradient.parameter.grad = None

    def _take_back_unused(self, own: np.ndarray, empty: list[Gradient]) -> None:
        """Set gradients that no rank has computed in this step to None again; collective.

        An optimizer skips those; zeros would still be moved by its momentum and weight decay.
        `own` says what this rank has used, and `empty` are those that were None in this step.
        """
        # One byte a parameter, in every step: a rank cannot know what others have used, unless
        # static_graph promises that it is what they used in the first step.
        used = self._used
        if self._first is None:
            used[...] = own
            if self.comm.size > 1:
                self.comm.allreduce(used, op="max", out=used)
            self._first = own if self._static else None
        elif (self._first != own).any():
            changed = np.flatnonzero(self._first != own).tolist()
            names = ", ".join(self.gradients[i].name for i in changed)
            raise InvalidArgument(
                f"rank {self.comm.rank}: static_graph=True, but only one of the first step and "
                f"this one has used {names}: expected the same parameters in all steps, or "
                "static_graph=False"
            )
        for gradient in empty:
            if used[gradient.index] or gradient.sparse:
                continue
            # A hook may have sent here what it had left out in earlier steps.
            if self.hook is None or not bool((gradient.view != 0).any()):
                gradient.parameter.grad = None

    def _average_sparse(self) -> None:
        """Average the sparse gradients; collective."""
        sparse = self.grouping.sparse
        parameters = [gradient.parameter for gradient in sparse]
        self.grouping.framework.average_sparse(self.comm, parameters, self.unused != "skip")
        for gradient in sparse:
            gradient.view = gradient.parameter.grad

    def _end_step(self, transport: Transport) -> None:
        """Reset the records after a step; in the first steps, change buckets or transport."""
        buckets, traced = self.grouping.buckets, self.comm.traced
        if traced is None:
            self.clock.end(transport.spans)
        else:
            self.clock.end(transport.spans, traced.recorder)
        name = self._autotune.after_step(self.clock.last)
        if name is not None:
            self.transport = self._use(name)
        self.pending = []
        if self.microbatches is not None:
            self.microbatches.begin()
            self.enabled = self.microbatches.last
        for gradient in self.gradients:
            gradient.state = RECEIVED
        self._begin_counts()
        move = getattr(self.hook, "move", None)
        if move is not None and self.grouping.buckets is not buckets:
            move(buckets, self.grouping.buckets)

    # -- buckets ------------------------------------------------------------------------------

    @property
    def observed(self) -> bool:
        """Whether the buckets are final: the order of gradients is no longer observed."""
        return self.grouping.fixed or self._autotune.observed

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
        InvalidArgument if a ZeroOptimizer has made steps with other buckets, by which its state is
        divided, or gradients are in flight in the present ones.
        """
        if self.pending and layout != self.grouping.layout:
            raise InvalidArgument(
                f"rank {self.comm.rank}: the state has other buckets, and "
                f"{counted(len(self.pending), 'bucket')} of this step were sent: call "
                "sync_gradients() before it is loaded"
            )
        self.grouping.fixed = self.grouping.fixed or observed
        moved = self._on_regroup is not None and layout != self.grouping.layout
        if moved and self.clock.steps:
            made = counted(self.clock.steps, "step")
            raise InvalidArgument(
                f"rank {self.comm.rank}: the ZeroOptimizer has made {made} with other buckets "
                "than those of the checkpoint: load it into new objects"
            )
        self.grouping.make(self.comm, layout, algorithms)
        if moved and self._on_regroup is not None:
            self._on_regroup()

    @property
    def sharded(self) -> bool:
        """Whether a sync leaves each rank with the mean of its shard only (ZeRO)."""
        return any(bucket.shard is not None for bucket in self.grouping.buckets)

    def fix(self, on_regroup: Callable[[], object]) -> None:
        """Keep parameters in their present buckets, and gradients in the buckets' buffers.

        Only :meth:`regroup` still changes the buckets; it then calls `on_regroup`.
        """
        self.grouping.fixed = self.active = True
        self._on_regroup = on_regroup

    @property
    def touched(self) -> np.ndarray:
        """For each gradient, 1 if it is this rank's own, not averaged; else 0 (uint8)."""
        return np.array([gradient.own for gradient in self.gradients], np.uint8)

    def not_averaged(self) -> list[Gradient]:
        """Return the gradients that are this rank's own, not averaged."""
        return [g for g in self.gradients if g.own and g.parameter.grad is not None]

    def is_averaged(self) -> bool:
        """Return whether backward ended with a sync, and no gradient has changed since."""
        if self.phase is not Phase.AVERAGED:
            return False
        if self.active:
            self._find_set()
        return not self.touched.any()

    def use_hook(self, hook: Hook) -> None:
        """Send gradients by a communication hook from now on.

        InvalidArgument if there is a hook already, a step was made without one, or a ZeroOptimizer
        divides the gradients.
        """
        if self.hook is not None or self.clock.steps or self.sharded:
            reason = "has a hook" if self.hook is not None else "divides its gradients (ZeRO)"
            reason = f"has made {counted(self.clock.steps, 'step')}" if self.clock.steps else reason
            raise InvalidArgument(
                f"rank {self.comm.rank}: this DDP {reason}: expected one hook, set before the "
                "first step"
            )
        self.hook, self._transports = hook, {}
        self.transport = self._use(self.name)

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
