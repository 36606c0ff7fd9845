"""What a pipeline runs: a schedule that was proved, the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import InvalidArgument
from ...pipeline import Action, PipelineSchedule, Placement, Step, as_schedule
from ...pipeline.messages import attach
from ...pipeline.prove import prove_parts

Made = TypeVar("Made")


@dataclass(frozen=True)
class Plan:
    """A schedule for given numbers.

    Attributes
    ----------
    name : str
        The schedule's.
    placement : Placement
        Where the virtual stages lie.
    steps : tuple of list of Step
        Of every rank.
    peaks : tuple of int
        The most activations of a chunk for a microbatch that are alive on each rank.
    """

    name: str
    placement: Placement
    steps: tuple[list[Step], ...]
    peaks: tuple[int, ...]

    @property
    def first(self) -> int:
        """The rank that holds the first stage."""
        return self.placement.owner(0)[0]

    @property
    def last(self) -> int:
        """The rank that holds the last stage."""
        return self.placement.owner(self.placement.stages - 1)[0]


def make_plan(
    schedule: str | PipelineSchedule | Callable, size: int, microbatches: int, chunks: int
) -> Plan:
    """Derive all steps, and prove that they can run."""
    known = as_schedule(schedule)
    placement = known.place(size, chunks)
    parts = [known.actions(rank, size, microbatches, chunks) for rank in range(size)]
    return plan_of(known.name, placement, parts, microbatches)


def plan_of(
    name: str, placement: Placement, parts: Sequence[Sequence[Action]], microbatches: int
) -> Plan:
    """Derive all steps of actions, one list for each rank, and prove that they can run."""
    steps = attach(parts, placement)
    proof = prove_parts(name, steps, placement, microbatches)
    return Plan(name, placement, steps, proof.peak)


def actions_of(plan: Plan) -> str:
    """Give what is the same for the same actions on all ranks, and in hardly any other case."""
    actions = repr([[step.action for step in part] for part in plan.steps])
    return hashlib.blake2b(actions.encode(), digest_size=8).hexdigest()


def together(comm: Any, make: Callable[[], Made], what: str) -> Made:
    """Make something on every rank; collective.

    Raises
    ------
    Exception
        On every rank if it fails on any: there what it was, elsewhere an InvalidArgument that says
        what has failed, and why.
    """
    made, failure = None, None
    try:
        made = make()
    except Exception as error:  # a generator of the user's own may raise anything
        failure = error
    told = comm.allgather_object(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, reason in enumerate(told):
        if reason:
            raise InvalidArgument(f"Pipeline: {what} fails on rank {rank}: {reason}")
    assert made is not None
    return made


def of_rank_0(comm: Any, make: Callable[[], Any]) -> Any:
    """Give every rank what rank 0 makes; collective.

    Raises
    ------
    Exception
        On every rank if it fails: on rank 0 what it was, elsewhere an InvalidArgument about it.
    """
    made, failure = None, None
    if comm.rank == 0:
        try:
            made = make()
        except Exception as error:
            failure = error
    told = failure and f"{type(failure).__name__}: {failure}"
    made, told = comm.broadcast_object((made, told))
    if failure is not None:
        raise failure
    if told:
        raise InvalidArgument(f"Pipeline: schedule='auto' fails on rank 0: {told}")
    return made


def agree(comm: Any, **settings: Any) -> None:
    """Raise InvalidArgument on every rank if ranks were given different things; collective."""
    everyone = comm.allgather_object(settings)
    for rank, found in enumerate(everyone):
        for name, value in found.items():
            if value != everyone[0][name]:
                raise InvalidArgument(
                    f"Pipeline: rank {rank} has {name} {value!r} where rank 0 has "
                    f"{everyone[0][name]!r}: they must be the same on every rank"
                )
