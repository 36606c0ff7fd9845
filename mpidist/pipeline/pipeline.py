"""The class Pipeline: microbatches pass through the stages of a model on several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import true_or_false
from ..checkpoint.state import Divided, state_of
from ..communicator.agreement import check_same, on_all_ranks
from ..communicator.communicator import Communicator, check_communicator
from ..errors import InvalidArgument
from ..nn import Module
from ..parallel.ddp import DDP
from ..parallel.deadline import allow_for_training
from .executor import Batch, PipelineExecutor
from .loss import BatchLoss
from .measuring import Measuring
from .microbatches import OutputForm, cut, cut_gradients, form_of
from .partitioning import Partition, tied_in
from .plan import Plan, make_plan
from .replicas import Forms, Replicas, Tied, clip, tied_forms
from .schedules import PipelineSchedule, as_schedule
from .schedules.trace import Trace
from .stage import Stage, stage_of
from .state import layers_of, load_stage, restage, resume_state
from .stats import PipelineStats, record


@dataclass(frozen=True)
class Arguments:
    """The arguments of :class:`~mpidist.Pipeline`, as the user gave them, with their checks."""

    num_microbatches: int
    schedule: str | PipelineSchedule | Callable
    checkpoint: bool
    max_live: int | Sequence[int] | None
    placement: str | None

    def check(self, rank: int) -> None:
        """Raise InvalidArgument for an argument that no pipeline can have; local."""
        where, schedule = f"rank {rank}: Pipeline", self.schedule
        given = self.num_microbatches
        if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
            raise InvalidArgument(
                f"{where}: num_microbatches={given!r}: expected a whole number > 0"
            )
        true_or_false("checkpoint", self.checkpoint, f"{where}: ")
        if self.max_live is not None and schedule != "auto":
            raise InvalidArgument(
                f"{where}: max_live={self.max_live!r} is for schedule='auto' only, not for "
                f"{schedule!r}"
            )
        if not isinstance(schedule, str):
            as_schedule(schedule)
        expected = (None, "loop", "v") if schedule == "auto" else (None,)
        if self.placement not in expected:
            raise InvalidArgument(
                f"{where}: placement={self.placement!r} with schedule={schedule!r}: expected "
                "'loop' or 'v', with schedule='auto'"
            )

    def settings(self, chunks: int, replicas: int) -> dict[str, Any]:
        """Return what must be equal on all ranks, by name."""
        schedule = self.schedule
        name = schedule if isinstance(schedule, str) else as_schedule(schedule).name
        return {**vars(self), "schedule": name, "chunks": chunks, "replicas": replicas}

    def plan(self, comm: Communicator, chunks: int, splits: bool) -> Plan | Measuring:
        """Return the plan of the proved schedule; for "auto" the Measuring that finds it.

        Collective, one round.  `splits` is whether backward of any stage of any rank has halves.
        """
        numbers = self.num_microbatches, chunks
        if self.schedule == "auto":
            return Measuring(comm, *numbers, self.max_live, splits, self.placement or "loop")
        plans: list[Plan] = []

        def digest() -> dict[str, str]:
            plans.append(make_plan(self.schedule, comm.size, *numbers))
            return {"a schedule with digest": plans[0].digest()}

        check_same("Pipeline", on_all_ranks(comm, digest, "Pipeline: schedule"))
        return plans[0]


EXPECTED = (
    "expected a module of PyTorch or mpidist.nn, an object with forward(x), backward(grad) and "
    "parameters(), or a list (a ModuleList, too) of these, the chunks of this rank"
)


def chunks_of(given: Any, rank: int) -> list[Any]:
    """Return the chunks of a rank as a list of modules; InvalidArgument for anything else."""
    where = f"rank {rank}: Pipeline: stage"
    if isinstance(given, Partition):
        raise InvalidArgument(
            f"{where} is a Partition, all stages of the model: expected those of this rank, as "
            "parts[comm.rank]"
        )
    torch = sys.modules.get("torch")
    lists = (list, tuple) if torch is None else (list, tuple, torch.nn.ModuleList)
    modules = list(given) if isinstance(given, lists) else [given]
    if not modules:
        raise InvalidArgument(f"{where}={given!r}: {EXPECTED}")
    for k, module in enumerate(modules):
        _check_chunk(module, f"{where}[{k}]" if isinstance(given, lists) else where)
    return modules


def _check_chunk(module: Any, where: str) -> None:
    """Raise InvalidArgument for an object that cannot be a chunk in any library."""
    bare = module.module if isinstance(module, DDP) else module
    if bare is None:
        raise InvalidArgument(f"{where} is None: {EXPECTED}")
    if isinstance(bare, type):
        name = bare.__name__
        raise InvalidArgument(
            f"{where} is the class {name}, not an object as {name}(…): {EXPECTED}"
        )
    torch, own = sys.modules.get("torch"), getattr(bare, "forward", None)
    bases = [Module] if torch is None else [Module, torch.nn.Module]
    if getattr(own, "__func__", None) in [base.forward for base in bases]:
        raise InvalidArgument(
            f"{where} is a {type(bare).__name__}, without a forward(): {EXPECTED}"
        )


def check_differentiates(rank: int, stages: Sequence[Stage], what: str) -> None:
    """Raise InvalidArgument if PyTorch records no graph for a stage; `what` names the call."""
    if any(stage.differentiates is False for stage in stages):
        raise InvalidArgument(
            f"rank {rank}: {what} within torch.no_grad() or inference_mode(): no parameter would "
            "get a gradient; call it outside, or use forward() to evaluate a model"
        )


def backward_follows(comm: Communicator, stages: Sequence[Stage]) -> bool:
    """Return whether forward() must save activations; collective.

    It must if any stage of any rank is in training mode and PyTorch records graphs; InvalidArgument
    on every rank if PyTorch records graphs on some ranks only.
    """
    # All must answer alike: a stage in evaluation, such as a frozen one, passes gradients on, too.
    records = [s.differentiates for s in stages if s.differentiates is not None]
    mine = [any(s.training for s in stages), True in records, False in records]
    everyone = comm.allgather(np.array(mine, np.uint8)).reshape(comm.size, len(mine))
    training, on, off = everyone.any(axis=0).tolist()
    if on and off:
        ranks = np.flatnonzero(everyone[:, 2]).tolist()
        raise InvalidArgument(
            f"forward() within torch.no_grad() or inference_mode() on ranks {ranks} of "
            f"{comm.size} only: expected all ranks with stages of PyTorch, or none"
        )
    return training and not off


class Pipeline:
    """A model cut into stages, of which each rank holds some; microbatches pass through them.

    Parameters
    ----------
    stage : module or list of modules
        The part of the model on this rank: a :class:`torch.nn.Module`, a
        :class:`mpidist.nn.Module` or an object with ``forward``, ``backward`` and ``parameters``.
        For schedules with several parts (chunks) on a rank, a list of them, or a
        :class:`torch.nn.ModuleList`.  Each may be in a :class:`~mpidist.DDP` over the ranks that
        hold the same stage.
    comm : Communicator
        The ranks, at least 2; the schedule says which stages each of them holds.
    num_microbatches : int
        Number of parts of a batch, of equal numbers of rows; the last takes the remainder.
    schedule : str, PipelineSchedule or callable
        A name, see ``mpidist list``, or a generator function of your own; it is proved first.
        "auto" measures the stages in the first steps, then computes a schedule for them.
    checkpoint : bool
        Whether stages keep only their inputs, and compute forward again in backward.  The random
        numbers of cupy are not repeated then.
    tied : mapping of str to parameter, optional
        Parameters that several ranks share, by names that all of these ranks give: they are made
        equal at the start, and their gradients are added up in each step.  A list of parameters
        under a name, if several chunks of a rank have it.  Parameters that stages of a
        :class:`Partition` share are tied in any case.
    max_live : int or sequence of int, optional
        For "auto": for how many microbatches a rank may save activations at a time (with several
        chunks, each chunk counts), one number for all ranks or one for each; by default the number
        of stages.
    placement : {"loop", "v"}, optional
        For "auto": which rank holds which chunk.  With "v", for two chunks a rank, rank r of p
        holds stages r and 2p-1-r; with "loop", the default, r, r+p, ….

    Attributes
    ----------
    module, comm, num_microbatches, schedule
        As given.  The deadline of `comm` becomes 30 minutes, unless one was set.

    Raises
    ------
    InvalidArgument
        If an argument is invalid, or differs between ranks.
    Unsupported
        If the schedule cannot be used with these numbers of ranks, microbatches and chunks.
    ScheduleError
        If the schedule is wrong; the message says where.
    """

    _least = 2  # ranks; mpidist check runs the stages on one rank, too

    def __init__(
        self,
        stage: Any,
        comm: Communicator,
        num_microbatches: int,
        schedule: str | PipelineSchedule | Callable = "1f1b",
        *,
        checkpoint: bool = False,
        tied: Mapping[str, Any] | None = None,
        max_live: int | Sequence[int] | None = None,
        placement: str | None = None,
    ):
        check_communicator(comm)
        if comm.size < self._least:
            raise InvalidArgument(
                f"rank {comm.rank}: Pipeline: comm has size {comm.size}: expected >= {self._least}"
            )
        arguments = Arguments(num_microbatches, schedule, checkpoint, max_live, placement)

        given, found = {} if tied is None else tied, {}

        def checked() -> tuple[dict[str, Any], bool, Forms]:
            arguments.check(comm.rank)
            chunks = self._chunks = chunks_of(stage, comm.rank)
            self._replicas = Replicas(chunks, comm.rank)
            where = f"rank {comm.rank}: chunk"
            self._stages = [
                stage_of(m, f"{where} {k}", comm, checkpoint) for k, m in enumerate(chunks)
            ]
            for chunk in chunks:
                found.update(tied_in(chunk.module if isinstance(chunk, DDP) else chunk))
            return (
                arguments.settings(len(chunks), self._replicas.count),
                any(s.splits for s in self._stages),
                tied_forms(given, found, comm.rank),
            )

        self.module, self.comm, self.schedule = stage, comm, schedule
        allow_for_training(comm)
        # A communicator of its own, so that no message of the user's is taken for an activation.
        own = comm.split(0)
        assert own is not None
        self._own: Communicator = own
        # Two rounds of the ranks.  In the first all that a rank can say by itself; the second, of
        # the plan, needs its outcome: equal settings, from which each rank makes the plan (for
        # unequal ones it would fail for reasons that are not the user's mistake), or for "auto"
        # whether any rank's stages split.
        settings, splits, forms = zip(*on_all_ranks(own, checked, "Pipeline: an argument"))
        check_same("Pipeline", settings)
        self.num_microbatches = int(num_microbatches)
        plan = arguments.plan(own, len(self._chunks), any(splits))
        self._tied = Tied(own, given, found, forms)
        self._executor = PipelineExecutor(
            own, plan, self._stages, self._replicas, self._tied, self.num_microbatches
        )
        self._outputs: list[OutputForm] = []
        self._backward_follows = False

    def __repr__(self) -> str:
        return (
            f"Pipeline({self._executor.plan.name}, num_microbatches={self.num_microbatches}, "
            f"rank {self.comm.rank} of {self.comm.size})"
        )

    # -- training -----------------------------------------------------------------------------

    def step(
        self,
        x: Any = None,
        target: Any = None,
        loss_fn: Any = None,
        count: Any = None,
        reduction: str | None = None,
    ) -> float:
        """Return the loss of a batch, and add its gradients to the parameters' ones; collective.

        Parameters
        ----------
        x : tensor, or tuple or dict of tensors
            The batch, on the rank that holds the first stage.  A tuple becomes the arguments of the
            stage, a dict its keyword arguments; the same holds between stages.  A Sequential takes
            one value of any type.
        target : tensor or structure of tensors
            The target, on the rank that holds the last stage, with as many rows as `x`.
        loss_fn : callable
            The loss function, on that rank: ``loss_fn(output, target)`` returns the mean over the
            rows of a microbatch, or their sum.  Without autograd, it also returns the gradient
            with respect to the output, or ``loss_fn.backward(scale)`` returns `scale` times that.
        count : callable, optional
            ``count(target)`` returns the divisor of the mean of a microbatch, where that is not its
            number of rows: for a function that ignores some targets, the number of the others.
            PyTorch's cross_entropy and nll_loss need none.
        reduction : {"mean", "sum"}, optional
            Whether `loss_fn` returns the mean or the sum; needed if it does not declare that by an
            attribute or a parameter ``reduction``.

        Returns
        -------
        float
            The mean loss over the batch, on every rank; with replicas, over the batches of all.
        """
        check_differentiates(self.comm.rank, self._stages, "step()")
        batch = self._batch(x)
        if self._executor.plan.last == self.comm.rank:
            rank, parts = self.comm.rank, self.num_microbatches
            batch.loss = loss = BatchLoss(loss_fn, target, parts, rank, count, reduction)
            # DDP takes the mean over the replicas; where they have unequal numbers of targets,
            # each divides by their mean number, so that all targets count alike.
            loss.total = self._replicas.mean(loss.total)
        self._backward_follows = False
        return self._executor.step(batch)

    def forward(self, x: Any = None) -> list[Any]:
        """Run the forward half of the schedule; collective.

        Activations of all microbatches are saved until :meth:`backward`, as in GPipe; none are if
        all stages are in evaluation mode, or PyTorch records no graph.

        Parameters
        ----------
        x : tensor, or tuple or dict of tensors
            The batch, on the rank that holds the first stage, as in :meth:`step`.

        Returns
        -------
        list
            The outputs of the microbatches, in order, on the rank that holds the last stage;
            elsewhere empty.
        """
        batch = self._batch(x)
        batch.keep = self._backward_follows = backward_follows(self._own, self._stages)
        self._executor.forward(batch)
        outputs = [batch.outputs[k] for k in sorted(batch.outputs)]
        self._outputs = [form_of(output) for output in outputs]
        return outputs

    def backward(self, grad: Any = None) -> None:
        """Run the backward half, after :meth:`forward`; collective.

        Parameters
        ----------
        grad : list, tensor or structure of tensors
            The gradients of the outputs, on the rank that holds the last stage: a list with those
            of each microbatch, or those of the whole batch, which are cut as the batch was.
        """
        rank = self.comm.rank
        if not self._backward_follows:
            raise InvalidArgument(
                f"rank {rank}: backward() without a forward() that saved activations: at least one "
                "stage must be in training, outside torch.no_grad()"
            )
        batch = Batch()
        if self._executor.plan.last == rank:
            batch.grads = cut_gradients(grad, self._outputs, rank)
        self._backward_follows = False
        self._executor.backward(batch)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all stages is at most `max_norm`; collective.

        Call it after a step.  Tied parameters count once.

        Returns
        -------
        float
            The norm before scaling, from sums in float64, on every rank.

        Raises
        ------
        Unsupported
            If a ZeroOptimizer has divided the gradients.
        """
        return clip(self._own, self._stages, self._replicas, self._tied, max_norm)

    def _batch(self, x: Any) -> Batch:
        rank, first = self.comm.rank, self._executor.plan.first
        if rank != first:
            return Batch()
        if x is None:
            raise InvalidArgument(f"rank {rank}: x=None: rank {first} must provide the input")
        return Batch(cut(x, self.num_microbatches, rank, "x"))

    # -- state --------------------------------------------------------------------------------

    by_stage = True
    """True: a checkpoint stores each stage once, by its number, also with replicas."""
    takes_parts = True
    """True: from a checkpoint it reads only the stages of this rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's stages, for :meth:`load_state_dict`.

        A :class:`Checkpoint` of the pipeline saves those of all ranks.

        Returns
        -------
        dict
            "stages": number of stages of the pipeline; "by_stage": for each stage of this rank, by
            its number, a dict of "state" and "layers" (number of layers of a Sequential, or None).
        """
        return self._state(resume_state)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what a Checkpoint saves: :meth:`state_dict`, with a DDP's buffers marked in it.

        Marked buffers may differ between replicas, see ``DDP.checkpoint_state``.
        """
        return self._state(state_of)

    def _state(self, of: Callable[[Any], Any]) -> dict[str, Any]:
        found = {
            number: {"layers": layers_of(module), "state": of(module)}
            for number, module in self._numbered().items()
        }
        return {"stages": self._executor.plan.placement.stages, "by_stage": Divided(found)}

    def _numbered(self) -> dict[int, Any]:
        """Return this rank's chunks, in their DDPs if they have one, by stage number."""
        place = self._executor.plan.placement
        return {place.stage(self.comm.rank, k): m for k, m in enumerate(self._chunks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of this rank's stages, in place; collective.

        If the saved pipeline was cut into other stages, its layers are distributed over the present
        ones; for that, all stages must be of class Sequential.

        Parameters
        ----------
        state : mapping
            The states of all stages, as :meth:`Checkpoint.load` passes them, or what
            :meth:`state_dict` returned on this rank of a pipeline with the same stages.

        Raises
        ------
        InvalidArgument
            If `state` is not of a pipeline, or of one with other layers, or lacks a stage.
        """
        place, rank = self._executor.plan.placement, self.comm.rank
        if not isinstance(state, Mapping) or not {"stages", "by_stage"} <= set(state):
            raise InvalidArgument(
                f"rank {rank}: state is a {type(state).__name__} without 'stages' and 'by_stage': "
                "expected the state of a Pipeline, as Checkpoint.load() passes it"
            )
        mine = self._numbered()
        every = self._own.allgather_object({n: layers_of(m) for n, m in mine.items()})
        layers = {n: count for found in every for n, count in found.items()}
        given = restage(
            state["by_stage"], state["stages"], [layers[n] for n in range(place.stages)], mine, rank
        )
        for number, module in mine.items():
            load_stage(module, given[number])

    # -- about it -----------------------------------------------------------------------------

    def stats(self) -> PipelineStats:
        """Return this rank's measurements: times, live activations and messages so far."""
        return self._executor.stats()

    def trace(self, path: str | Path) -> Trace:
        """Write the time of each action of the last step, on all ranks; collective.

        ``mpidist show --trace`` draws the file under the prediction.  A forward() counts as a step
        once its backward() has run; the time between them is drawn, too.

        Parameters
        ----------
        path : str or Path
            The file that rank 0 writes, in the form of :meth:`mpidist.Communicator.trace`.

        Returns
        -------
        Trace
            The trace, on every rank.
        """
        return record(self._own, self._executor.last, self.num_microbatches, path)

    def close(self) -> None:
        """Free the communicators of the pipeline; collective."""
        self._tied.free()
        self._own.free()
