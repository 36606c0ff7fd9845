"""The plan of a pipeline: a proved schedule, the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .schedules import Action, PipelineSchedule, Placement, Step, as_schedule
from .schedules.messages import with_messages
from .schedules.prove import prove_parts


@dataclass(frozen=True)
class Plan:
    """A proved schedule for given numbers of ranks, microbatches and chunks."""

    name: str
    placement: Placement
    steps: tuple[list[Step], ...]  # of every rank
    # Largest number of live activations (of a chunk for a microbatch) on each rank.
    peaks: tuple[int, ...]

    @cached_property
    def first(self) -> int:
        """The rank that holds the first stage."""
        return self.placement.owner(0)[0]

    @cached_property
    def last(self) -> int:
        """The rank that holds the last stage."""
        return self.placement.owner(self.placement.stages - 1)[0]

    def digest(self) -> str:
        """Return a digest of the actions of all ranks, by which ranks compare their plans."""
        actions = repr([[step.action for step in part] for part in self.steps])
        return hashlib.blake2b(actions.encode(), digest_size=8).hexdigest()


def make_plan(
    schedule: str | PipelineSchedule | Callable, size: int, microbatches: int, chunks: int
) -> Plan:
    """Return the plan of a schedule, after proving it; ScheduleError if it is wrong."""
    known = as_schedule(schedule)
    placement = known.place(size, chunks)
    parts = [known.actions(rank, size, microbatches, chunks) for rank in range(size)]
    return plan_of(known.name, placement, parts, microbatches)


def plan_of(
    name: str, placement: Placement, parts: Sequence[Sequence[Action]], microbatches: int
) -> Plan:
    """Return the plan of given actions (`parts`: one list per rank), after proving it."""
    steps = with_messages(parts, placement)
    proof = prove_parts(name, steps, placement, microbatches)
    return Plan(name, placement, steps, proof.peak)
