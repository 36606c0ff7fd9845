"""Runs the actions of a rank, step by step; in the end all ranks agree on the outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import CommunicationError, InvalidArgument, MpidistError, RankFailed, ScheduleError
from .channel import Edges
from .loss import BatchLoss
from .plan import (
    Measuring,
    Plan,
    Program,
    Task,
    actions_of,
    agree,
    backwards,
    compile_steps,
    forwards,
    say_where,
)
from .replicas import Averaging, Tied
from .schedules import Costs, Span
from .stage import Stage
from .stats import Clock, Live, PipelineStats
from .values import ONE_TENSOR, Form, Parcel, Tensors, flatten, unflatten


@dataclass
class Batch:
    """What a run is about.

    Attributes
    ----------
    inputs, rows : list
        The microbatches and their numbers of rows, where the first stage is.
    loss : BatchLoss or None
        Where the last stage is.
    grads : list or None
        The gradients of the last stage's outputs, in place of losses.
    keep : bool
        Whether there will be a way back.
    total : float
        The losses, added up.
    outputs : dict of int to object
        The last stage's outputs where no loss is computed of them.
    """

    inputs: Sequence[Any] = ()
    rows: Sequence[int] = ()
    loss: BatchLoss | None = None
    grads: Sequence[Any] | None = None
    keep: bool = True
    total: float = 0.0
    outputs: dict[int, Any] = field(default_factory=dict)


class Executor:
    """Runs programs.

    Parameters
    ----------
    edges : Edges
        To and from the other ranks.
    completes : callable
        ``completes(chunk)`` is called before the action that completes the chunk's gradients.

    Attributes
    ----------
    live : Live
        What is alive.
    spans : list of Span
        The actions that were run since it was emptied, in seconds of ``perf_counter``.
    """

    def __init__(self, edges: Edges, completes: Callable[[int], object]):
        self.edges, self.live = edges, Live()
        self._completes = completes
        self._saved: dict[tuple[int, int], Any] = {}
        self._handed: dict[int, Parcel] = {}
        self.spans: list[Span] = []

    def forget(self) -> None:
        """Drop what a forward kept for a backward that never came."""
        self._saved.clear()
        self._handed.clear()

    def run(self, program: Program, batch: Batch) -> None:
        """Run a program; sends may be under way afterwards."""
        edges = self.edges
        act = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}
        for message, tag, worker in program.opening:
            edges.post(message.source, tag, worker.tensors)
        for task in program.tasks:
            try:
                parcel = None
                if task.receive is not None:
                    parcel = self._take(task)
                if task.completes:
                    self._completes(task.chunk)
                begin = perf_counter()
                made = act[task.kind](task, parcel, batch)
                self.spans.append(Span(task.action, begin, perf_counter()))
                send = task.send
                if send is None or made is None:
                    continue
                if send.local:
                    self._handed[task.send_tag] = made
                else:
                    edges.send(send.target, task.send_tag, made)
            except Exception as error:
                say_where(error, task)
                raise

    def _take(self, task: Task) -> Parcel:
        """Wait for what the task needs, and have receives ready for what comes after it."""
        message = task.receive
        assert message is not None
        if message.local:
            return self._handed.pop(task.receive_tag)
        parcel = self.edges.receive(message, task.receive_tag, task.worker.tensors)
        if task.following is not None:
            self.edges.post(message.source, task.following_tag, task.worker.tensors)
        return parcel

    def _forward(self, task: Task, parcel: Parcel | None, batch: Batch) -> Parcel | None:
        worker, tree = task.worker, None
        leaves: list[Any] = []
        if parcel is None:
            value, rows = batch.inputs[task.microbatch], batch.rows[task.microbatch]
        else:
            form, tensor = parcel.form, worker.tensors.tensor
            leaves = [tensor(array, f) for array, f in zip(parcel.arrays, form.tensors)]
            tree, rows = form.tree, form.rows
            value = unflatten(tree, leaves)
        loss = batch.loss if task.last else None
        output, saved = worker.forward(value, tree, leaves, batch.keep, loss is not None)
        if saved is not None:
            self._saved[task.chunk, task.microbatch] = saved
        made = None
        if loss is not None:
            part = loss.of(task.microbatch, rows)
            batch.total += worker.attach_loss(saved, output, part)
        else:
            made = self._output(task, output, saved, rows, batch)
        if saved is not None:
            self.live.enter(saved, worker.nbytes(saved))
        return made

    def _output(
        self, task: Task, output: Any, saved: Any, rows: int, batch: Batch
    ) -> Parcel | None:
        tree, tensors = flatten(output, "the output of a stage")
        if not tensors and not task.last:
            raise InvalidArgument(
                f"the output of a stage is {output!r}: allowed are tensors, and tuples, lists and "
                "dicts with at least one in them"
            )
        if saved is not None:
            task.worker.finish(saved, tree, tensors)
        library = task.worker.tensors
        if task.last:
            batch.outputs[task.microbatch] = unflatten(tree, [library.result(t) for t in tensors])
            return None
        return _pack(library, tree, tensors, rows, library.own)

    def _gradients(self, task: Task, parcel: Parcel | None, batch: Batch) -> list[Any] | None:
        """Give the gradients of the outputs; None where the loss begins."""
        if parcel is not None:
            form, tensor = parcel.form, task.worker.tensors.tensor
            given = [tensor(array, f) for array, f in zip(parcel.arrays, form.tensors)]
            return given if form.tree == ONE_TENSOR else list(unflatten(form.tree, given))
        return None if batch.grads is None else batch.grads[task.microbatch]

    def _kept(self, task: Task) -> Any:
        key = task.chunk, task.microbatch
        return self._saved.pop(key) if task.releases else self._saved[key]

    def _backward(self, task: Task, parcel: Parcel | None, batch: Batch) -> Parcel | None:
        grads = self._gradients(task, parcel, batch)
        return _packed_gradients(task, task.worker.backward(self._kept(task), grads))

    def _input(self, task: Task, parcel: Parcel | None, batch: Batch) -> Parcel | None:
        grads, saved = self._gradients(task, parcel, batch), self._kept(task)
        found = task.worker.backward_input(saved, grads)
        nbytes = task.worker.nbytes(saved)
        if nbytes != saved.size:
            saved.resize(nbytes)
        return _packed_gradients(task, found)

    def _weight(self, task: Task, parcel: Parcel | None, batch: Batch) -> None:
        task.worker.backward_weight(self._kept(task))


def _pack(
    library: Tensors, tree: Any, tensors: list[Any], rows: int, array: Callable[[Any], Any]
) -> Parcel:
    form = Form(tree, tuple([library.form(t) for t in tensors]), rows)
    return Parcel(form, [array(t) for t in tensors])


def _packed_gradients(task: Task, grads: list[Any]) -> Parcel | None:
    """Make a parcel of the inputs' gradients, where somebody waits for it."""
    if task.send is None:
        return None
    library, tree = task.worker.tensors, ONE_TENSOR
    if len(grads) != 1 or grads[0] is None:
        tree, grads = flatten(tuple(grads))
    return _pack(library, tree, grads, 0, library.array)


class Ended(NamedTuple):
    """The last run that had a way back.

    Attributes
    ----------
    plan : Plan
        What was run.
    spans : tuple of Span
        Its actions.
    peak, peak_bytes, predicted : int
        The most activations that were alive, their bytes, and what the schedule says.
    """

    plan: Plan
    spans: tuple[Span, ...]
    peak: int
    peak_bytes: int
    predicted: int


class Ending:
    """What is left when every action has ended.

    Parameters
    ----------
    comm : Communicator
        The pipeline's own.
    averaging : Averaging
        Of the replicas.
    tied : Tied
        Parameters that ranks share.
    """

    def __init__(self, comm: Communicator, averaging: Averaging, tied: Tied):
        self._comm, self._averaging, self._tied = comm, averaging, tied
        self._sums = np.zeros(2)  # over the ranks: the loss, and how many failed

    def sync(self, live: Live, predicted: int, name: str) -> MpidistError | None:
        """Bring gradients together; give what only this rank may know to be wrong."""
        problem: MpidistError | None = None
        for sync in (self._averaging.sync, self._tied.sync):  # both, as other ranks wait in them
            try:
                sync()
            except CommunicationError:
                raise
            except MpidistError as error:
                problem = problem or error
        if problem is None and (live.count or live.peak > predicted):
            problem = ScheduleError(
                f"{live.peak} activations were alive at a time and {live.count} still are, "
                f"{predicted} and 0 are what {name} promises",
                rank=self._comm.rank,
            )
        return problem

    def agree(self, loss: float | None, problem: MpidistError | None) -> float:
        """Give the loss, which one rank has at most; collective.

        Raises
        ------
        MpidistError
            On every rank, if any has a problem: its own, or else RankFailed.
        """
        self._sums[0], self._sums[1] = loss or 0.0, problem is not None
        self._comm.allreduce(self._sums, out=self._sums)
        if self._sums[1]:
            raise self._told(problem)
        return float(self._sums[0])

    def _told(self, problem: MpidistError | None) -> MpidistError:
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        everyone = self._comm.allgather_object(said)
        if problem is not None:
            return problem
        rank = next(rank for rank, text in enumerate(everyone) if text is not None)
        error = RankFailed(f"rank {rank} ended its part of the step with {everyone[rank]}")
        error.echo = True
        return error


class Runner:
    """Runs the stages of one rank.

    Parameters
    ----------
    comm : Communicator
        The pipeline's own.
    plan : Plan or Measuring
        What to run; or what finds it out in the first steps.
    workers : list of Stage
        The chunks of this rank.
    averaging : Averaging
        Of the replicas.
    tied : Tied
        Parameters that ranks share.
    microbatches : int
        How many.

    Attributes
    ----------
    plan : Plan
        What is run now.
    ended : Ended
        The last run that had a way back.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: Plan | Measuring,
        workers: list[Stage],
        averaging: Averaging,
        tied: Tied,
        microbatches: int,
    ):
        self._measuring = plan if isinstance(plan, Measuring) else None
        self.plan: Plan = plan.plan if isinstance(plan, Measuring) else plan
        agree(comm, actions=actions_of(self.plan))
        self._costs: Costs | None = None
        self._comm, self._workers, self._microbatches = comm, workers, microbatches
        self._averaging, self._tied = averaging, tied
        self._ending = Ending(comm, averaging, tied)
        self._edges = Edges(comm, microbatches, self.plan.placement.stages)
        self._executor = Executor(self._edges, averaging.completes)
        self._programs: dict[str, Program] = {}
        self._clock, self.ended = Clock(), Ended(self.plan, (), 0, 0, self.plan.peaks[comm.rank])
        self._parts: list[Sequence[Span]] = []
        self._seconds, self._predicted = 0.0, 0

    def step(self, batch: Batch) -> float:
        """Run all of a step; give the loss; collective."""
        began = self._begin(self.plan.peaks[self._comm.rank])
        self._run("step", batch)
        return self._finish(batch, began)

    def forward(self, batch: Batch) -> None:
        """Run the forward half; collective."""
        began = self._begin(len(self._workers) * self._microbatches)
        self._run("forward", batch)
        with self._guard("forward"):
            self._edges.finish()
        self._part(began)

    def backward(self, batch: Batch) -> None:
        """Run the other half; collective."""
        began = perf_counter()
        self._executor.spans = []
        self._run("backward", batch)
        self._finish(None, began)

    def _begin(self, predicted: int) -> float:
        began = perf_counter()
        executor = self._executor
        executor.forget()
        executor.live.begin()
        executor.spans, self._parts = [], []
        self._seconds, self._predicted = 0.0, predicted
        return began

    def _program(self, name: str) -> Program:
        if name not in self._programs:
            rank, plan = self._comm.rank, self.plan
            steps = plan.steps[rank]
            if name != "step":
                steps = forwards(steps) if name == "forward" else backwards(steps)
            made = compile_steps(steps, rank, plan.placement, self._workers, self._edges.tag)
            self._programs[name] = made
        return self._programs[name]

    def _run(self, name: str, batch: Batch) -> None:
        program = self._program(name)
        if name != "forward":
            self._check_tied()
        with self._guard(name):
            if name != "forward":
                self._averaging.begin()
                self._tied.begin()
            self._executor.run(program, batch)

    def _part(self, began: float) -> None:
        """Take down a run, or a half of one."""
        self._parts.append(self._executor.spans)
        self._seconds += perf_counter() - began

    def _finish(self, batch: Batch | None, began: float) -> float:
        """Do what is left when every action has ended."""
        executor, loss = self._executor, None
        with self._guard("backward" if batch is None else "step"):
            problem = self._ending.sync(executor.live, self._predicted, self.plan.name)
            self._edges.finish()
            if batch is not None and self.plan.last == self._comm.rank:
                loss = self._averaging.loss(batch.total)
            found = self._ending.agree(loss, problem)
            self._part(began)
            self._clock.note(self._parts, self._seconds)
            spans, live = tuple([s for part in self._parts for s in part]), executor.live
            about = live.peak, live.peak_bytes, self._predicted
            self.ended = Ended(self.plan, spans, *about)
            if self._measuring is not None and batch is not None:
                self._learn(self._measuring)
        return found

    def _check_tied(self) -> None:
        if self._tied.names and self._averaging.divided:
            raise InvalidArgument(
                f"rank {self._comm.rank}: Pipeline: tied={self._tied.names} with a ZeroOptimizer: "
                "a rank gets the mean of its own slices only, so these gradients cannot be added "
                "up; allowed is an optimizer of whole parameters"
            )

    def _learn(self, measuring: Measuring) -> None:
        found = measuring.note(self._executor.spans)
        if found is not None:
            (self.plan, self._costs), self._measuring = found, None
            self._programs.clear()

    def stats(self) -> PipelineStats:
        """Give what was measured."""
        clock, ended, edges = self._clock, self.ended, self._edges
        return PipelineStats(
            steps=clock.steps,
            seconds=clock.mean(clock.seconds),
            busy=clock.mean(clock.busy),
            span=clock.mean(clock.span),
            bubble=clock.bubble,
            peak_live=ended.peak,
            predicted_live=ended.predicted,
            peak_bytes=ended.peak_bytes,
            messages=edges.messages,
            bytes=edges.nbytes,
            announced=edges.announced,
            schedule=self.plan.name,
            costs=self._costs,
            splits=tuple(worker.splits for worker in self._workers),
        )

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Guard a run: what fails within it leaves the pipeline broken."""
        with self._comm.guard(f"pipeline {what}"):
            try:
                yield
            except BaseException:
                self._averaging.end()
                raise
