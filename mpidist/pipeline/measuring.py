"""``schedule="auto"``: the first steps measure the stages, then a schedule is computed for them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..communicator.agreement import from_rank_0
from ..communicator.communicator import Communicator
from .plan import Plan, plan_of
from .schedules import Action, Costs, Placement, Span
from .schedules.automatic import automatic, check_caps

STEPS = 4
"""Number of measured steps; the first one only warms up."""


class Measuring:
    """The first steps of ``schedule="auto"``, which measure the stages; created collectively.

    `cap` is the largest number of live activations on a rank: one for all, one for each, or None
    for the number of virtual stages; `splits` is whether backward of any stage of any rank has
    halves.
    """

    def __init__(
        self,
        comm: Communicator,
        microbatches: int,
        chunks: int,
        cap: Any,
        splits: bool,
        placement: str,
    ):
        self._placement = placement
        self._comm, self._microbatches, self._chunks = comm, microbatches, chunks
        self._cap = check_caps(cap, comm.size, chunks, f"rank {comm.rank}: Pipeline: max_live")
        self._splits = splits
        # Nothing is known yet: the plan is one for stages of equal times, under the same cap.
        self.plan, self._left = self._compute(Costs()), STEPS
        self._seconds: dict[tuple[int, str], list[float]] = {}

    def _compute(self, costs: Costs) -> Plan:
        """Return the plan that rank 0 computes (ranks may have different schedules registered)."""
        size, microbatches, chunks = self._comm.size, self._microbatches, self._chunks
        where = self._cap, chunks, self._placement, self._splits

        def orders() -> list[list[Action]]:
            made = automatic(size, microbatches, costs, *where)
            return [made.actions(rank, size, microbatches, chunks) for rank in range(size)]

        parts = from_rank_0(self._comm, orders, "Pipeline: schedule='auto'")
        return plan_of("auto", Placement(size, chunks, self._placement), parts, microbatches)

    def note(self, spans: Sequence[Span]) -> tuple[Plan, Costs] | None:
        """Record a step's spans; after the last one return the new plan and the measured costs.

        Collective.  Before the last step it returns None.
        """
        self._left -= 1
        if self._left < STEPS - 1:
            for action, begin, end in spans:
                stage = self.plan.placement.stage(self._comm.rank, action.chunk)
                kind = "I" if action.kind == "B" else action.kind
                self._seconds.setdefault((stage, kind), []).append(end - begin)
        if self._left:
            return None
        medians = {key: statistics.median(times) for key, times in self._seconds.items()}
        found: dict[tuple[int, str], float] = {}
        for part in self._comm.allgather_object(medians):
            found.update(part)
        stages = range(self.plan.placement.stages)
        forward, halves, weights = (
            [found.get((stage, kind), 0.0) for stage in stages] for kind in "FIW"
        )
        costs = Costs(forward, halves, weights)
        return self._compute(costs), costs
