"""Pipeline: microbatches pass through the stages of a model on several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.format import Divided, state_of
from ..errors import InvalidArgument
from ..nn import Module
from ..parallel.ddp import DDP
from .executor import Batch, Runner
from .loss import BatchLoss
from .microbatches import Output, cut, cut_gradients, shape_of
from .partition import Partition
from .plan import Measuring, Plan, agree, make_plan, together
from .replicas import Averaging, Tied, clip
from .schedules import PipelineSchedule, as_schedule
from .schedules.trace import Trace
from .stage import Recomputing, Stage, stage_of
from .state import deal, layers_of, load_stage
from .stats import PipelineStats, record


def check_communicator(comm: Any) -> None:
    """Raise InvalidArgument for what is no communicator, or too small for a pipeline."""
    if not isinstance(getattr(comm, "rank", None), int):
        raise InvalidArgument(
            f"comm={comm!r}: allowed are communicators, as mpidist.init() gives them"
        )
    if comm.size < 2:
        raise InvalidArgument(
            f"rank {comm.rank}: Pipeline: comm has size {comm.size}: the size must be >= 2, one "
            "rank is no pipeline"
        )


def check_differentiates(rank: int, workers: Sequence[Stage], what: str) -> None:
    """Raise InvalidArgument where gradients are asked for, and no graph would be made."""
    if any(worker.differentiates is False for worker in workers):
        raise InvalidArgument(
            f"rank {rank}: {what} within torch.no_grad() or inference_mode(): no parameter would "
            "get a gradient; allowed is calling it outside, and forward() to evaluate a model"
        )


def will_go_back(comm: Any, workers: Sequence[Stage]) -> bool:
    """Agree on whether a forward keeps what a backward needs; collective.

    It does if any stage of any rank is in training, and PyTorch makes graphs.

    Raises
    ------
    InvalidArgument
        On every rank, if PyTorch does so on some ranks only.
    """
    differentiates = [w.differentiates for w in workers if w.differentiates is not None]
    mine = [any(w.training for w in workers), True in differentiates, False in differentiates]
    everyone = comm.allgather(np.array(mine, np.uint8)).reshape(comm.size, len(mine))
    training, on, off = everyone.any(axis=0).tolist()
    if on and off:
        ranks = np.flatnonzero(everyone[:, 2]).tolist()
        raise InvalidArgument(
            f"forward() within torch.no_grad() or inference_mode() on ranks {ranks} of "
            f"{comm.size} only: allowed are all that hold stages of PyTorch, or none"
        )
    return training and not off


ALLOWED = (
    "allowed are a module of PyTorch or mpidist.nn, an object with forward(x), backward(grad) and "
    "parameters(), or a list (a ModuleList, too) of these, the chunks of this rank"
)


class Chunks:
    """The chunks of a rank.

    Parameters
    ----------
    given : module or list of modules
        What the user gave.
    comm : Communicator
        Who will send for them.
    checkpoint : bool
        Whether they compute forward once more on the way back.

    Attributes
    ----------
    modules : list of module
        As given, in a DDP or not.
    workers : list of Stage
        One for each chunk.
    averaging : Averaging
        Of their replicas.

    Raises
    ------
    InvalidArgument
        If it is no module, and no list of modules.
    """

    def __init__(self, given: Any, comm: Any, checkpoint: bool):
        rank = comm.rank
        where = f"rank {rank}: Pipeline: stage"
        self.modules = modules = _listed(given, where)
        several = len(modules) > 1 or modules[0] is not given
        for k, module in enumerate(modules):
            _check(module, f"{where}[{k}]" if several else where)
        self.averaging = Averaging(modules, rank)
        workers = [stage_of(m, f"rank {rank}: chunk {k}", comm) for k, m in enumerate(modules)]
        self.workers: list[Stage] = [Recomputing(w) for w in workers] if checkpoint else workers

    def __len__(self) -> int:
        return len(self.workers)


def _listed(given: Any, where: str) -> list[Any]:
    """List the chunks."""
    if isinstance(given, Partition):
        raise InvalidArgument(
            f"{where} is a Partition, all stages of the model: allowed are those of this rank, as "
            "parts[comm.rank]"
        )
    torch = sys.modules.get("torch")
    lists = (list, tuple) if torch is None else (list, tuple, torch.nn.ModuleList)
    modules = list(given) if isinstance(given, lists) else [given]
    if not modules:
        raise InvalidArgument(f"{where}={given!r}: {ALLOWED}")
    return modules


def _check(module: Any, where: str) -> None:
    """Raise InvalidArgument for what cannot be a chunk whatever library it is of."""
    bare = module.module if isinstance(module, DDP) else module
    if bare is None:
        raise InvalidArgument(f"{where} is None: {ALLOWED}")
    if isinstance(bare, type):
        name = bare.__name__
        raise InvalidArgument(f"{where} is the class {name}, not an object as {name}(…): {ALLOWED}")
    torch, own = sys.modules.get("torch"), getattr(bare, "forward", None)
    bases = [Module] if torch is None else [Module, torch.nn.Module]
    if getattr(own, "__func__", None) in [base.forward for base in bases]:
        raise InvalidArgument(f"{where} is a {type(bare).__name__}, without a forward(): {ALLOWED}")


@dataclass(frozen=True)
class Settings:
    """Arguments of :class:`~mpidist.Pipeline`, as given."""

    num_microbatches: int
    schedule: str | PipelineSchedule | Callable
    checkpoint: bool
    max_live: int | Sequence[int] | None
    placement: str | None

    def check(self, rank: int) -> None:
        """Raise InvalidArgument for what no pipeline can be made of."""
        where, given = f"rank {rank}: Pipeline", self.num_microbatches
        schedule, checkpoint = self.schedule, self.checkpoint
        if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
            raise InvalidArgument(
                f"{where}: num_microbatches must be > 0, a whole number, not {given!r}"
            )
        if not isinstance(checkpoint, bool):
            raise InvalidArgument(f"{where}: checkpoint={checkpoint!r}: allowed are True and False")
        if self.max_live is not None and schedule != "auto":
            raise InvalidArgument(
                f"{where}: max_live={self.max_live!r} is for schedule='auto' only, not for "
                f"{schedule!r}"
            )
        if not isinstance(schedule, str):
            as_schedule(schedule)
        allowed = (None, "loop", "v") if schedule == "auto" else (None,)
        if self.placement not in allowed:
            raise InvalidArgument(
                f"{where}: placement={self.placement!r} with schedule={schedule!r}: allowed are "
                "'loop' and 'v', with schedule='auto'"
            )

    def agree(self, comm: Any, chunks: Chunks) -> None:
        """Raise InvalidArgument on every rank if ranks were given different things; collective."""
        named, schedule = isinstance(self.schedule, str), self.schedule
        agree(
            comm,
            schedule=schedule if named else as_schedule(schedule).name,
            num_microbatches=self.num_microbatches,
            chunks=len(chunks),
            max_live=self.max_live,
            placement=self.placement,
            checkpoint=self.checkpoint,
            replicas=chunks.averaging.replicas,
        )

    def plan(self, comm: Any, chunks: Chunks) -> Plan | Measuring:
        """Prove the schedule, or begin to find one out; collective."""
        numbers = self.num_microbatches, len(chunks)
        if self.schedule == "auto":
            splits = any(worker.splits for worker in chunks.workers)
            return Measuring(comm, *numbers, self.max_live, splits, self.placement or "loop")
        return together(comm, partial(make_plan, self.schedule, comm.size, *numbers), "schedule")


class Pipeline:
    """A model cut into stages, of which each rank holds some; microbatches pass through them.

    Parameters
    ----------
    stage : module or list of modules
        What this rank holds: a :class:`torch.nn.Module`, a :class:`mpidist.nn.Module` or an object
        with ``forward``, ``backward`` and ``parameters``; a list (a :class:`torch.nn.ModuleList`,
        too) for schedules with several chunks a rank.  Each may be in a :class:`~mpidist.DDP`,
        whose ranks hold the same stage.
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
        their gradients are added up.  A list of parameters under a name, if several chunks of a
        rank share one.
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
        check_communicator(comm)
        settings = Settings(num_microbatches, schedule, checkpoint, max_live, placement)

        def checked() -> Chunks:
            settings.check(comm.rank)
            return Chunks(stage, comm, checkpoint)

        self._own = comm.split(0)
        chunks = together(self._own, checked, "an argument")
        self.module, self.comm = stage, comm
        self.num_microbatches, self.schedule = int(num_microbatches), schedule
        self._averaging, self._workers = chunks.averaging, chunks.workers
        self._modules = chunks.modules
        settings.agree(self._own, chunks)
        plan = settings.plan(self._own, chunks)
        self._tied = Tied(self._own, {} if tied is None else tied)
        parts = self._workers, self._averaging, self._tied, num_microbatches
        self._runner = Runner(self._own, plan, *parts)
        self._outputs: list[Output] = []
        self._goes_back = False

    def __repr__(self) -> str:
        return (
            f"Pipeline({self._runner.plan.name}, num_microbatches={self.num_microbatches}, "
            f"rank {self.comm.rank} of {self.comm.size})"
        )

    # -- training -----------------------------------------------------------------------------

    def step(
        self, x: Any = None, target: Any = None, loss_fn: Any = None, count: Any = None
    ) -> float:
        """Compute the loss of a batch and add to all gradients; collective.

        Parameters
        ----------
        x : tensor, or tuple or dict of tensors
            The batch, on the rank that holds the first stage; a tuple is given to the stage as
            arguments, a dict as keyword arguments, and so is what stages give each other.  A
            Sequential takes one value, whatever it is.
        target : tensor or structure of tensors
            On the rank that holds the last stage, with as many rows.
        loss_fn : callable
            There ``loss_fn(output, target)`` gives the mean over the rows of a microbatch (their
            sum, if it has ``reduction="sum"``).  Without autograd it has ``backward(scale)``, or
            gives the loss and its gradient.  The mean of PyTorch's cross_entropy and nll_loss goes
            over the targets that are not ignored, with their weights, as it does unsplit.
        count : callable, optional
            There ``count(target)`` gives over how much the mean of a microbatch goes, where that is
            not its rows: for another function that leaves targets out, their number.  Without it
            means that PyTorch's functions do not compute, such as ``loss[mask].mean()``, are taken
            for those over the rows, and what ``torch.compile`` made is called twice.

        Returns
        -------
        float
            The mean over the batch, on every rank; with replicas, over theirs too.
        """
        check_differentiates(self.comm.rank, self._workers, "step()")
        batch = self._batch(x)
        if self._runner.plan.last == self.comm.rank:
            loss = BatchLoss(loss_fn, target, self.num_microbatches, self.comm.rank, count)
            loss.total = self._averaging.rows(loss.total)
            batch.loss = loss
        self._goes_back = False
        return self._runner.step(batch)

    def forward(self, x: Any = None) -> list[Any]:
        """Run the forward half of the schedule; collective.

        Every microbatch stays alive until :meth:`backward`, as in GPipe; while all stages are in
        evaluation (or PyTorch's gradients are off) nothing is kept.

        Returns
        -------
        list
            The outputs of the microbatches on the rank that holds the last stage; elsewhere empty.
        """
        batch = self._batch(x)
        batch.keep = self._goes_back = will_go_back(self._own, self._workers)
        self._runner.forward(batch)
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
        rank = self.comm.rank
        if not self._goes_back:
            raise InvalidArgument(
                f"rank {rank}: backward() without a forward() before it of which something was "
                "kept: at least one stage must be in training, outside torch.no_grad()"
            )
        batch = Batch()
        if self._runner.plan.last == rank:
            batch.grads = cut_gradients(grad, self._outputs, rank)
        self._goes_back = False
        self._runner.backward(batch)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all stages is at most `max_norm`; collective.

        To be called after a step.  Parameters that are tied count once.

        Returns
        -------
        float
            The norm before, from sums in float64, on every rank.

        Raises
        ------
        Unsupported
            If a ZeroOptimizer has divided the gradients.
        """
        divided = self._averaging.divided
        return clip(self._own, self._workers, self._tied, divided, max_norm)

    def _batch(self, x: Any) -> Batch:
        rank, first = self.comm.rank, self._runner.plan.first
        if rank != first:
            return Batch()
        if x is None:
            raise InvalidArgument(f"rank {rank}: x=None: rank {first} must provide the input")
        inputs, rows = cut(x, self.num_microbatches, rank, "x")
        return Batch(inputs, rows)

    # -- state --------------------------------------------------------------------------------

    by_stage = True
    """True: a checkpoint has each stage once, by its number, also that of a grid."""
    takes_parts = True
    """True: of a checkpoint it reads the stages of this rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's stages by number; a Checkpoint has those of all."""
        return self._state(lambda module: module.state_dict())

    def checkpoint_state(self) -> dict[str, Any]:
        """Return :meth:`state_dict` as a :class:`Checkpoint` takes it."""
        return self._state(state_of)

    def _state(self, of: Callable[[Any], Any]) -> dict[str, Any]:
        found = {
            number: {"layers": layers_of(module), "state": of(module)}
            for number, module in self._stages().items()
        }
        return {"stages": self._runner.plan.placement.stages, "by_stage": Divided(found)}

    def _stages(self) -> dict[int, Any]:
        """Return this rank's chunks, as the user gave them, by the number of the stage."""
        place = self._runner.plan.placement
        return {place.stage(self.comm.rank, k): m for k, m in enumerate(self._modules)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the states of this rank's stages, in place; collective.

        Of a pipeline with other stages, if they all are a Sequential, the layers are dealt anew.

        Raises
        ------
        InvalidArgument
            If it is not the state of such a pipeline.
        """
        place, rank = self._runner.plan.placement, self.comm.rank
        if not isinstance(state, Mapping) or not {"stages", "by_stage"} <= set(state):
            raise InvalidArgument(
                f"rank {rank}: state is not one that a checkpoint has of a Pipeline"
            )
        mine = self._stages()
        every = self._own.allgather_object({n: layers_of(m) for n, m in mine.items()})
        layers = {n: count for found in every for n, count in found.items()}
        given = deal(state["by_stage"], [layers[n] for n in range(place.stages)], rank)
        for number, module in mine.items():
            load_stage(module, given[number])

    # -- about it -----------------------------------------------------------------------------

    def stats(self) -> PipelineStats:
        """Give where the time went, what was alive, and what was sent."""
        return self._runner.stats()

    def trace(self, path: str | Path) -> Trace:
        """Write when each action of the last step ran, on all ranks; collective.

        ``mpidist show --trace`` draws the file under what was predicted.  A forward() counts as a
        step once its backward() has run; what was between them is in the picture, too.

        Parameters
        ----------
        path : str or Path
            Where rank 0 writes it, see :mod:`mpidist.pipeline.trace`.

        Returns
        -------
        Trace
            On every rank.
        """
        ended = self._runner.ended
        return record(self._own, ended.plan, self.num_microbatches, ended.spans, ended.peak, path)

    def close(self) -> None:
        """Give back the communicators that were made for this; collective."""
        self._tied.free()
        self._own.free()
