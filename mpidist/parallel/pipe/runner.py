"""Runs what a plan says, with what is before and after."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from ...engine.messages import Posting
from ...errors import InvalidArgument
from ...pipeline import Costs, Span
from .averaging import Averaging
from .edges import Edges
from .ending import Ended, Ending
from .executor import Batch, Executor
from .measuring import Measuring
from .pipeline_stats import Clock, PipelineStats
from .plan import Plan, actions_of, agree
from .stage import Stage
from .tasks import Program, backwards, compile_steps, forwards
from .tied import Tied


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
        comm: Any,
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
        self._posting, self._ending = Posting(comm), Ending(comm, averaging, tied)
        self._edges = Edges(self._posting, microbatches, self.plan.placement.stages)
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
        with _Breaking(self, "forward"):
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
        self._posting.check_usable()
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
        self._posting.check_usable()
        program = self._program(name)
        if name != "forward":
            self._check_tied()
            self._averaging.begin()
            self._tied.begin()
        with _Breaking(self, name):
            self._executor.run(program, batch)

    def _part(self, began: float) -> None:
        """Take down a run, or a half of one."""
        self._parts.append(self._executor.spans)
        self._seconds += perf_counter() - began

    def _finish(self, batch: Batch | None, began: float) -> float:
        """Do what is left when every action has ended."""
        executor, loss = self._executor, None
        with _Breaking(self, "backward" if batch is None else "step"):
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

    def broke(self, error: BaseException, what: str) -> BaseException:
        """Note that a run was left unfinished, and give the error to be raised."""
        self._averaging.end()
        return self._posting.broke(error, f"pipeline {what}", self._edges.under_way())


class _Breaking:
    """What fails within it leaves the pipeline broken."""

    def __init__(self, runner: Runner, what: str):
        self._runner, self._what = runner, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            raise self._runner.broke(error, self._what) from error.__cause__
