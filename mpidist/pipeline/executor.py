"""The executor of a pipeline: runs a rank's actions; all ranks agree on each step's outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from weakref import WeakSet

import numpy as np

from ..communicator.agreement import answers
from ..communicator.communicator import Communicator
from ..communicator.layers import guard
from ..errors import CommunicationError, InvalidArgument, MpidistError, RankFailed, ScheduleError
from ..trace import profiled
from .channel import Channel
from .loss import BatchLoss
from .measuring import Measuring
from .microbatches import Microbatches
from .plan import Plan
from .replicas import Replicas, Tied
from .schedules import Costs, Span
from .stage import SavedActivations, Stage
from .stats import LastStep, PipelineStats, StepTimes
from .tasks import Task, Tasks, tasks_of
from .values import ONE_TENSOR, Metadata, TensorMessage, Tensors, Tree, flatten, unflatten


@dataclass
class Batch:
    """The input of one run of a pipeline (step, forward or backward), and its outcome."""

    inputs: Microbatches = field(default_factory=Microbatches)  # on the rank of the first stage
    loss: BatchLoss | None = None  # on the rank of the last stage
    # On the rank of the last stage, for a backward without a loss: for each microbatch, the list of
    # its outputs' gradients.
    grads: Sequence[Any] | None = None
    keep: bool = True  # whether a backward follows, for which activations are saved
    total: float = 0.0  # sum of the microbatches' weighted losses: the loss of the batch
    # Of the last stage, by microbatch, where no loss is computed from them.
    outputs: dict[int, Any] = field(default_factory=dict)


class PipelineExecutor:
    """Runs the stages of one rank, action by action (F: forward, B: backward of a microbatch).

    Rank 1 of 3 with 4 microbatches, by the schedule "1f1b".  Each action waits for one message
    (a: activation from rank 0, g: gradient from rank 2) and sends one; as soon as a message has
    arrived, the receive of the next one of the same kind is posted::

        action       F0   F1   B0   F2   B1   F3   B2   B3
        waits for    a0   a1   g0   a2   g1   a3   g2   g3
        then posts   a1   a2   g1   a3   g2   -    g3   -        (a0 and g0 before the first action)
        sends        a0   a1   g0   a2   g1   a3   g2   g3       a to rank 2, g to rank 0
        saved        0    01   1    12   2    23   3    -        microbatches with saved activations

    The last B of a chunk completes its gradients: a DDP sends them while other ranks still compute.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: Plan | Measuring,
        stages: list[Stage],
        replicas: Replicas,
        tied: Tied,
        microbatches: int,
    ):
        self._measuring = plan if isinstance(plan, Measuring) else None
        self.plan: Plan = plan.plan if isinstance(plan, Measuring) else plan
        self._comm, self._stages, self._microbatches = comm, stages, microbatches
        self._replicas, self._tied = replicas, tied
        self._channel = Channel(comm, microbatches, self.plan.placement.stages)
        self._tasks: dict[str, Tasks] = {}
        # Saved activations by chunk and microbatch.  How many are alive is counted by the objects,
        # weakly: so a reference that a stage forgot to drop is found by the proof's number.
        self._saved: dict[tuple[int, int], Any] = {}
        self._live: WeakSet[SavedActivations] = WeakSet()
        self._peak = self._predicted = 0
        self._local: dict[int, TensorMessage] = {}  # by tag: from one chunk of this rank to another
        # Times: of the present part, of all parts of the step, of all steps.
        self._spans: list[Span] = []
        self._parts: list[list[Span]] = []
        self._seconds, self._clock = 0.0, StepTimes()
        self._costs: Costs | None = None
        self.last = LastStep(self.plan, (), 0, self.plan.peaks[comm.rank])
        self._sums = np.zeros(2)  # over the ranks: the loss, and the number of failures

    # -- steps and their halves -------------------------------------------------------------------

    def step(self, batch: Batch) -> float:
        """Run a training step and return the loss; collective."""
        began = self._begin(self.plan.peaks[self._comm.rank])
        self._run("step", batch)
        return self._finish(batch, began)

    def forward(self, batch: Batch) -> None:
        """Run the forward half of a step, which fills ``batch.outputs``; collective."""
        began = self._begin(len(self._stages) * self._microbatches)
        self._run("forward", batch)
        with self._guard("forward"):
            self._channel.finish()
        self._end_part(began)

    def backward(self, batch: Batch) -> None:
        """Run the backward half of a step, after :meth:`forward`; collective."""
        began = perf_counter()
        self._spans = []
        self._run("backward", batch)
        self._finish(None, began)

    def _begin(self, predicted: int) -> float:
        """Begin a step; return the time at which it began, by ``time.perf_counter``.

        Activations left by a forward without a backward are dropped.  `predicted` is the largest
        number of live activations that the schedule allows.
        """
        began = perf_counter()
        self._saved.clear()
        self._local.clear()
        self._spans, self._parts, self._seconds = [], [], 0.0
        self._peak, self._predicted = len(self._live), predicted
        return began

    def _run(self, what: str, batch: Batch) -> None:
        """Run all tasks of this rank; afterwards sends may still be pending.

        `what` is "step", "forward" or "backward".
        """
        tasks = self._tasks.get(what) or self._prepare(what)
        with self._guard(what):
            if what != "forward":
                # Each microbatch adds to the gradients: a DDP sends them after the last one only.
                self._replicas.pause()
                self._tied.begin()
            for source, tag, stage in tasks.opening:
                self._channel.post(source, tag, stage.tensors)
            for task in tasks.tasks:
                try:
                    self._act(task, batch)
                except Exception as error:
                    task.explain(error)
                    raise

    def _prepare(self, what: str) -> Tasks:
        """Return the tasks of a step or of one half, computed at its first use and kept."""
        if what != "forward" and self._tied.names and self._replicas.sharded:
            raise InvalidArgument(
                f"rank {self._comm.rank}: Pipeline: tied={self._tied.names} with a ZeroOptimizer: "
                "a rank gets the mean of its own slices only, so these gradients cannot be added "
                "up; expected an optimizer of whole parameters"
            )
        rank, plan = self._comm.rank, self.plan
        kinds = {"step": "FBIW", "forward": "F", "backward": "BIW"}[what]
        steps = [step for step in plan.steps[rank] if step.action.kind in kinds]
        made = tasks_of(steps, rank, plan.placement, self._stages, self._channel.tag)
        self._tasks[what] = made
        return made

    # -- actions ----------------------------------------------------------------------------------

    def _act(self, task: Task, batch: Batch) -> None:
        """Run one task: wait for its message, run its action on the stage, and send the result."""
        message = None
        if task.receive is not None:
            message = self._receive(task)
        # The last backward of the stage: from here on its DDP sends each bucket once it is full.
        if task.completes:
            self._replicas.resume(task.chunk)
        begin = perf_counter()
        with profiled(f"mpidist.{task.action}"):
            made = _ACTIONS[task.kind](self, task, message, batch)
        self._spans.append(Span(task.action, begin, perf_counter()))
        if made is None:
            return
        if task.send_to < 0:
            self._local[task.send_tag] = made
        else:
            self._channel.send(task.send_to, task.send_tag, made)

    def _receive(self, task: Task) -> TensorMessage:
        """Return the message of a task: wait for it, and post the receives of the next like it.

        A message between two chunks of this rank is there already.
        """
        if task.local:
            return self._local.pop(task.receive_tag)
        source, tensors = task.receive, task.stage.tensors
        assert source is not None
        message = self._channel.receive(source, task.receive_tag, tensors)
        if task.following is not None:
            self._channel.post(source.source, task.following_tag, tensors)
        return message

    def _forward(
        self, task: Task, message: TensorMessage | None, batch: Batch
    ) -> TensorMessage | None:
        """Run F; return the message for the next stage, or None after the last one."""
        stage = task.stage
        if message is None:
            tree, rows = batch.inputs.tree, batch.inputs.rows[task.microbatch]
            tensors = batch.inputs.tensors[task.microbatch]
        else:
            tree, rows = message.metadata.tree, message.metadata.rows
            tensors = _tensors(message, stage.tensors)
        loss = None
        if task.last and batch.loss is not None:
            loss = batch.loss.of(task.microbatch, rows)
        output, saved = stage.forward(tree, tensors, message is None, batch.keep, loss)
        if saved is not None:
            self._saved[task.chunk, task.microbatch] = saved
            self._live.add(saved)
            self._peak = max(self._peak, len(self._live))
        if loss is not None:
            batch.total += output
            return None
        tree, tensors = flatten(output, "the output of a stage")
        if not tensors and not task.last:
            raise InvalidArgument(
                f"the output of a stage is {output!r}: expected tensors, or tuples, lists and "
                "dicts with at least one in them"
            )
        if saved is not None:
            stage.finish(saved, tree, tensors)
        convert = stage.tensors
        if task.last:
            results = [convert.result(t) for t in tensors]
            batch.outputs[task.microbatch] = unflatten(tree, results)
            return None
        return _message(convert, tree, tensors, rows, convert.own)

    def _backward(
        self, task: Task, message: TensorMessage | None, batch: Batch
    ) -> TensorMessage | None:
        grads = self._gradients(task, message, batch)
        return _gradient_message(task, task.stage.backward(self._saved_of(task), grads))

    def _backward_input(
        self, task: Task, message: TensorMessage | None, batch: Batch
    ) -> TensorMessage | None:
        grads = self._gradients(task, message, batch)
        return _gradient_message(task, task.stage.backward_input(self._saved_of(task), grads))

    def _backward_weight(self, task: Task, message: TensorMessage | None, batch: Batch) -> None:
        task.stage.backward_weight(self._saved_of(task))

    def _saved_of(self, task: Task) -> Any:
        key = task.chunk, task.microbatch
        return self._saved.pop(key) if task.releases else self._saved[key]

    def _gradients(
        self, task: Task, message: TensorMessage | None, batch: Batch
    ) -> list[Any] | None:
        """Return the gradients of the task's outputs; None if backward begins at the loss."""
        if message is None:
            return None if batch.grads is None else batch.grads[task.microbatch]
        given, tree = _tensors(message, task.stage.tensors), message.metadata.tree
        return given if tree == ONE_TENSOR else list(unflatten(tree, given))

    # -- the end of a step ------------------------------------------------------------------------

    def _finish(self, batch: Batch | None, began: float) -> float:
        """Average gradients, agree on errors, record the step and return the loss; collective.

        `began` is the result of :meth:`_begin`.  After a backward without a loss, `batch` is None
        and the result 0.
        """
        loss = 0.0
        with self._guard("backward" if batch is None else "step"):
            problem = self._sync()
            self._channel.finish()
            # Two collectives, of different groups: the replicas of the last stage have different
            # batches, of which the mean counts; then each pipeline tells its stages, with a sum.
            if batch is not None and self.plan.last == self._comm.rank:
                loss = self._replicas.mean(batch.total)
            loss = self._agree(loss, problem)
            self._end_part(began)
            self._clock.note(self._parts, self._seconds)
            spans = tuple([span for part in self._parts for span in part])
            number = self._clock.steps - 1
            self.last = LastStep(self.plan, spans, self._peak, self._predicted, number)
            if self._comm.traced is not None:
                events = self.last.events(self._comm, self._microbatches)
                self._comm.traced.recorder.events.extend(events)
            if self._measuring is not None and batch is not None:
                self._measure(self._measuring)
        return loss

    def _end_part(self, began: float) -> None:
        self._parts.append(self._spans)
        self._seconds += perf_counter() - began

    def _sync(self) -> MpidistError | None:
        """Average gradients over replicas, and add up those of tied parameters; collective.

        An error that other ranks may not have is returned, so that :meth:`_agree` can share it;
        so is one for more live activations than the schedule promises.
        """
        problem: MpidistError | None = None
        for sync in (self._replicas.sync, self._tied.sync):  # both: other ranks wait in them
            try:
                sync()
            except CommunicationError:
                raise
            except MpidistError as error:
                problem = problem or error
        live, peak = len(self._live), self._peak
        if problem is None and (live or peak > self._predicted):
            problem = ScheduleError(
                f"{peak} activations were alive at a time, and {live} after the step: expected at "
                f"most {self._predicted}, and 0, by the proof of schedule {self.plan.name}",
                rank=self._comm.rank,
            )
        return problem

    def _agree(self, loss: float, problem: MpidistError | None) -> float:
        """Return the sum of `loss` over the ranks, all but one of which pass 0; collective.

        If any rank passes a `problem`, it is raised there, and RankFailed on the others.
        """
        # One allreduce of two numbers in a good step; texts are exchanged after a bad one only.
        sums = self._sums
        sums[0], sums[1] = loss, problem is not None
        self._comm.allreduce(sums, out=sums)
        if not sums[1]:
            return float(sums[0])

        def tell() -> None:
            if problem is not None:
                raise problem

        found = answers(self._comm, tell)
        if found.own is not None:
            raise found.own
        rank, text = next(iter(found.errors.items()))
        error = RankFailed(f"rank {rank} ended its part of the step with {text}")
        error.echo = True  # of an error on another rank, whose own traceback says more
        raise error

    def _measure(self, measuring: Measuring) -> None:
        """Record a step of ``schedule="auto"``; after the last one, switch to the new plan."""
        found = measuring.note(self._spans)
        if found is not None:
            (self.plan, self._costs), self._measuring = found, None
            self._tasks.clear()

    def stats(self) -> PipelineStats:
        """Return this rank's measurements of the steps so far."""
        clock, last, channel = self._clock, self.last, self._channel
        return PipelineStats(
            steps=clock.steps,
            seconds=clock.mean(clock.seconds),
            busy=clock.mean(clock.busy),
            span=clock.mean(clock.span),
            bubble=clock.bubble,
            peak_live=last.peak,
            predicted_live=last.predicted,
            messages=channel.messages,
            bytes=channel.nbytes,
            announced=channel.announced,
            schedule=self.plan.name,
            costs=self._costs,
            splits=tuple(stage.splits for stage in self._stages),
        )

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Return a context in which an error makes the pipeline's communicator unusable.

        `what` is "step", "forward" or "backward", for the message.
        """
        with guard(self._comm, f"pipeline {what}"):
            try:
                yield
            except BaseException:
                self._replicas.resume_all()
                raise


_ACTIONS: dict[str, Callable[..., TensorMessage | None]] = {
    "F": PipelineExecutor._forward,
    "B": PipelineExecutor._backward,
    "I": PipelineExecutor._backward_input,
    "W": PipelineExecutor._backward_weight,
}


def _tensors(message: TensorMessage, convert: Tensors) -> list[Any]:
    """Return the arrays of a message, converted to tensors of the stage that receives them."""
    tensor = convert.tensor
    return [tensor(array, f) for array, f in zip(message.arrays, message.metadata.tensors)]


def _message(
    convert: Tensors, tree: Tree, tensors: list[Any], rows: int, array: Callable[[Any], np.ndarray]
) -> TensorMessage:
    metadata = Metadata(tree, tuple([convert.form(t) for t in tensors]), rows)
    return TensorMessage(metadata, [array(t) for t in tensors])


def _gradient_message(task: Task, grads: list[Any]) -> TensorMessage | None:
    """Return the message with `grads`, the gradients of the inputs; None on the first stage."""
    if task.send is None:
        return None
    # One tensor is the usual case: its tree is a constant, which needs no flatten().
    convert, tree = task.stage.tensors, ONE_TENSOR
    if len(grads) != 1 or grads[0] is None:
        tree, grads = flatten(tuple(grads))
    return _message(convert, tree, grads, 0, convert.array)
