"""What a pipeline was asked for, besides its stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from ...errors import InvalidArgument
from ...pipeline import PipelineSchedule, as_schedule
from .chunks import Chunks
from .measuring import Measuring
from .plan import Plan, agree, make_plan, together


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
