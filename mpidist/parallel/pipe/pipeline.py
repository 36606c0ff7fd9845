"""Pipeline: what users hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ...errors import InvalidArgument, ScheduleError
from ...pipeline import Costs, PipelineSchedule, as_schedule
from ...pipeline.trace import Trace
from ...posting import Posting
from .averaging import Averaging
from .edges import Edges
from .executor import Batch, Executor
from .loss import Weighing
from .measuring import Measuring
from .microbatches import Output, cut, cut_gradients, shape_of
from .pipeline_stats import Clock, PipelineStats
from .plan import actions_of, agree, make_plan, together
from .recompute import Recomputing
from .record import record
from .stage import Stage, stage_of
from .tasks import Program, backwards, compile_steps, forwards
from .tied import Tied


class Pipeline:
    """A model cut into stages, of which each rank holds some; microbatches pass through them.

    Parameters
    ----------
    stage : module or list of modules
        What this rank holds: a :class:`torch.nn.Module`, a :class:`mpidist.nn.Module` or an object
        with ``forward``, ``backward`` and ``parameters``; a list for schedules with several chunks
        a rank.  Each may be in a :class:`~mpidist.DDP`, whose ranks hold the same stage.
    comm : Communicator
        The ranks, at least 2; the schedule says which stages each of them holds.
    num_microbatches : int
        Into how many parts a batch is cut; the last has the remainder.
    schedule : str, PipelineSchedule or callable
        A name, see ``mpidist list``, or a generator function of your own; it is proved first.
        "auto" measures the stages in the first steps, then computes a schedule for them.
    checkpoint : bool
        Whether stages keep only their inputs, and compute forward once more on the way back.
    tied : mapping of str to parameter, optional
        Parameters that several ranks share, by names that all of them give: they start equal, and
        their gradients are added up.
    max_live : int or sequence of int, optional
        For "auto": how many activations (of a chunk for a microbatch) may be alive on a rank, one
        number for all or one for each; by default as many as there are stages.
    placement : {"loop", "v"}, optional
        For "auto": how the chunks lie on the ranks.  With "v", for two chunks a rank, rank r of p
        holds stages r and 2p-1-r; with "loop", the default, r, r+p, ….

    Attributes
    ----------
    module, comm, num_microbatches, schedule
        As given.

    Raises
    ------
    InvalidArgument
        If an argument is not allowed, or differs between ranks.
    Unsupported
        If the schedule does not serve these numbers.
    ScheduleError
        If the schedule is wrong; the message says where.
    """

    def __init__(
        self,
        stage: Any,
        comm: Any,
        num_microbatches: int,
        schedule: str | PipelineSchedule | Callable = "1f1b",
        *,
        checkpoint: bool = False,
        tied: Mapping[str, Any] | None = None,
        max_live: int | Sequence[int] | None = None,
        placement: str | None = None,
    ):
        _check(comm, num_microbatches, checkpoint)
        if max_live is not None and schedule != "auto":
            raise InvalidArgument(
                f"rank {comm.rank}: Pipeline: max_live={max_live!r} is for schedule='auto' only, "
                f"not for {schedule!r}"
            )
        if placement is not None and (schedule != "auto" or placement not in ("loop", "v")):
            raise InvalidArgument(
                f"rank {comm.rank}: Pipeline: placement={placement!r} with schedule={schedule!r}: "
                "allowed are 'loop' and 'v', with schedule='auto'"
            )
        self.module, self.comm = stage, comm
        self.num_microbatches, self.schedule = num_microbatches, schedule
        modules = stage if isinstance(stage, (list, tuple)) else [stage]
        rank = comm.rank
        if not modules:
            raise InvalidArgument(
                f"rank {rank}: Pipeline: stage={stage!r}: allowed are a module, or a list of the "
                "chunks of this rank"
            )
        self._averaging = Averaging(modules, rank)
        workers = [stage_of(m, f"rank {rank}: chunk {k}") for k, m in enumerate(modules)]
        self._workers: list[Stage] = [Recomputing(w) for w in workers] if checkpoint else workers
        self._own = comm.split(0)
        self._measuring: Measuring | None = None
        self._costs: Costs | None = None
        agree(
            self._own,
            schedule=schedule if isinstance(schedule, str) else as_schedule(schedule).name,
            num_microbatches=num_microbatches,
            chunks=len(modules),
            max_live=max_live,
            placement=placement,
            checkpoint=checkpoint,
            replicas=self._averaging.replicas,
        )
        if schedule == "auto":
            splits = any(w.splits for w in self._workers)
            splits = any(self._own.allgather_object(splits))
            numbers = num_microbatches, len(modules), max_live
            self._measuring = Measuring(self._own, *numbers, splits, placement or "loop")
            self._plan = self._measuring.plan
        else:
            numbers = comm.size, num_microbatches, len(modules)
            self._plan = together(self._own, lambda: make_plan(schedule, *numbers))
        agree(self._own, actions=actions_of(self._plan))
        self._tied = Tied(self._own, {} if tied is None else tied)
        self._posting = Posting(self._own)
        stages = self._plan.placement.stages
        self._edges = Edges(self._posting, num_microbatches, stages)
        self._executor = Executor(self._edges, self._averaging.completes)
        self._programs: dict[str, Program] = {}
        self._clock, self._loss = Clock(), np.zeros(1)
        self._outputs: list[Output] = []
        self._predicted = self._plan.peaks[rank]

    def __repr__(self) -> str:
        name = self._plan.name
        return (
            f"Pipeline({name}, num_microbatches={self.num_microbatches}, "
            f"rank {self.comm.rank} of {self.comm.size})"
        )

    # -- training -----------------------------------------------------------------------------

    def step(self, x: Any = None, target: Any = None, loss_fn: Any = None) -> float:
        """Compute the loss of a batch and add to all gradients; collective.

        Parameters
        ----------
        x : tensor, or tuple or dict of tensors
            The batch, on the rank that holds the first stage; a tuple is given to the stage as
            arguments, a dict as keyword arguments, and so is what stages give each other.
        target : tensor or structure of tensors
            On the rank that holds the last stage, with as many rows.
        loss_fn : callable
            There ``loss_fn(output, target)`` gives the mean over the rows of a microbatch (their
            sum, if it has ``reduction="sum"``).  Without autograd it has ``backward(scale)``, or
            gives the loss and its gradient.

        Returns
        -------
        float
            The mean over the rows of the batch, on every rank; with replicas, over theirs too.
        """
        began = perf_counter()
        batch = self._batch(x)
        if self._plan.last == self.comm.rank:
            batch.loss = self._losses(target, loss_fn)
        self._run("step", batch)
        return self._finish(batch, began)

    def forward(self, x: Any = None) -> list[Any]:
        """Run the forward half of the schedule; collective.

        Every microbatch stays alive until :meth:`backward`, as in GPipe; while modules are in
        evaluation (or PyTorch's gradients are off) nothing is kept.

        Returns
        -------
        list
            The outputs of the microbatches on the rank that holds the last stage; elsewhere empty.
        """
        batch = self._batch(x)
        batch.keep = all(worker.learns for worker in self._workers)
        self._run("forward", batch)
        self._edges.finish()
        outputs = [batch.outputs[k] for k in sorted(batch.outputs)]
        self._outputs = [shape_of(output) for output in outputs]
        return outputs

    def backward(self, grad: Any = None) -> None:
        """Run the other half, after :meth:`forward`; collective.

        Parameters
        ----------
        grad : list, tensor or structure of tensors
            The gradients of the outputs, on the rank that holds the last stage: a list of one for
            each microbatch, or one for the batch, which is cut as the batch was.
        """
        began = perf_counter()
        if not self._executor.keeps:
            raise InvalidArgument(f"rank {self.comm.rank}: backward() without a forward() before")
        batch = Batch()
        if self._plan.last == self.comm.rank:
            batch.grads = cut_gradients(grad, self._outputs, self.comm.rank)
        self._run("backward", batch)
        self._finish(None, began)

    # -- between the actions ------------------------------------------------------------------

    def _program(self, name: str) -> Program:
        if name not in self._programs:
            steps = self._plan.steps[self.comm.rank]
            if name != "step":
                steps = forwards(steps) if name == "forward" else backwards(steps)
            self._programs[name] = compile_steps(
                steps,
                self.comm.rank,
                self._plan.placement,
                self._workers,
                self._edges.tag,
            )
        return self._programs[name]

    def _run(self, name: str, batch: Batch) -> None:
        self._posting.check_usable()
        program, executor = self._program(name), self._executor
        if name != "backward":
            executor.forget()
            executor.live.begin()
            executor.spans = []
            halves = len(self._workers) * self.num_microbatches
            self._predicted = self._plan.peaks[self.comm.rank] if name == "step" else halves
        if name != "forward":
            self._check_tied()
            self._averaging.begin()
            self._tied.begin()
        try:
            executor.run(program, batch)
        except BaseException as error:
            self._averaging.end()
            raise self._posting.broke(
                error, f"pipeline {name}", self._edges.under_way()
            ) from error.__cause__

    def _finish(self, batch: Batch | None, began: float) -> float:
        """Do what is left when every action has ended."""
        self._averaging.sync()
        self._tied.sync()
        self._edges.finish()
        last = self._plan.last
        if batch is not None:
            if last == self.comm.rank:
                self._loss[0] = self._averaging.loss(batch.total)
            self._own.broadcast(self._loss, last, out=self._loss)
        self._check_live()
        self._clock.note(self._executor.spans, perf_counter() - began)
        if self._measuring is not None and batch is not None:
            self._learn(self._measuring)
        return float(self._loss[0])

    def _learn(self, measuring: Measuring) -> None:
        found = measuring.note(self._executor.spans)
        if found is not None:
            (self._plan, self._costs), self._measuring = found, None
            self._programs.clear()

    def _check_tied(self) -> None:
        if self._tied.names and self._averaging.divided:
            raise InvalidArgument(
                f"rank {self.comm.rank}: Pipeline: tied={self._tied.names} with a ZeroOptimizer: a "
                "rank gets the mean of its own slices only, so these gradients cannot be added up; "
                "allowed is an optimizer of whole parameters"
            )

    def _check_live(self) -> None:
        live, predicted = self._executor.live, self._predicted
        if live.count or live.peak > predicted:
            raise ScheduleError(
                f"{live.peak} activations were alive at a time and {live.count} still are, "
                f"{predicted} and 0 are what {self._plan.name} promises",
                rank=self.comm.rank,
            )

    # -- arguments ----------------------------------------------------------------------------

    def _batch(self, x: Any) -> Batch:
        rank, first = self.comm.rank, self._plan.first
        if rank != first:
            return Batch()
        if x is None:
            raise InvalidArgument(f"rank {rank}: x=None: rank {first} must provide the input")
        inputs, rows = cut(x, self.num_microbatches, rank, "x")
        return Batch(inputs, rows)

    def _losses(self, target: Any, loss_fn: Any) -> Callable[[int, int], Any]:
        rank = self.comm.rank
        if target is None:
            raise InvalidArgument(f"rank {rank}: target=None: rank {rank} must provide the target")
        targets, counts = cut(target, self.num_microbatches, rank, "target")
        weighing, total = Weighing(loss_fn, rank), self._averaging.rows(sum(counts))

        def loss(microbatch: int, rows: int) -> Any:
            if rows != counts[microbatch]:
                raise InvalidArgument(
                    f"rank {rank}: target has {counts[microbatch]} rows in microbatch "
                    f"{microbatch}: allowed are the {rows} of the input"
                )
            return weighing.of(targets[microbatch], rows, total)

        return loss

    # -- about it -----------------------------------------------------------------------------

    def stats(self) -> PipelineStats:
        """Give where the time went, what was alive, and what was sent."""
        clock, live, edges = self._clock, self._executor.live, self._edges
        return PipelineStats(
            steps=clock.steps,
            seconds=clock.mean(clock.seconds),
            busy=clock.mean(clock.busy),
            span=clock.mean(clock.span),
            bubble=clock.bubble,
            peak_live=live.peak,
            predicted_live=self._predicted,
            peak_bytes=live.peak_bytes,
            messages=edges.messages,
            bytes=edges.nbytes,
            announced=edges.announced,
            schedule=self._plan.name,
            costs=self._costs,
            splits=tuple(worker.splits for worker in self._workers),
        )

    def trace(self, path: str | Path) -> Trace:
        """Write when each action of the last step ran, on all ranks; collective.

        ``mpidist show --trace`` draws the file under what was predicted.

        Parameters
        ----------
        path : str or Path
            Where rank 0 writes it, see :mod:`mpidist.pipeline.trace`.

        Returns
        -------
        Trace
            On every rank.
        """
        spans, live = tuple(self._executor.spans), self._executor.live
        return record(self._own, self._plan, self.num_microbatches, spans, live.peak, path)

    def close(self) -> None:
        """Give back the communicators that were made for this; collective."""
        self._tied.free()
        self._own.free()


def _check(comm: Any, num_microbatches: Any, checkpoint: Any) -> None:
    if not isinstance(getattr(comm, "rank", None), int):
        raise InvalidArgument(
            f"comm={comm!r}: allowed are communicators, as mpidist.init() gives them"
        )
    where, given = f"rank {comm.rank}: Pipeline", num_microbatches
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InvalidArgument(
            f"{where}: num_microbatches must be > 0, a whole number, not {given!r}"
        )
    if comm.size < 2:
        raise InvalidArgument(
            f"{where}: comm has size {comm.size}: the size must be >= 2, one rank is no pipeline"
        )
    if not isinstance(checkpoint, bool):
        raise InvalidArgument(f"{where}: checkpoint={checkpoint!r}: allowed are True and False")
