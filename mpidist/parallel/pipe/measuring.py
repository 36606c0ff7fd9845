"""schedule="auto": the first steps measure the stages, then a schedule is computed for them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ...pipeline import Action, Costs, Placement, Span
from ...pipeline.automatic import automatic, check_caps
from .plan import Plan, of_rank_0, plan_of

STEPS = 4
"""Steps that are measured; the first one only warms up."""


class Measuring:
    """The steps before the schedule is known; collective to make.

    Parameters
    ----------
    comm : Communicator
        Of the pipeline.
    microbatches, chunks : int
        How many there are, and stages on every rank.
    cap : int or sequence of int or None
        Activations that may be alive on a rank.
    splits : bool
        Whether any stage of this rank can do backward in halves.
    placement : {"loop", "v"}
        How the chunks lie on the ranks.

    Attributes
    ----------
    plan : Plan
        What is run meanwhile: computed for stages that take equally long, under the same cap.
    """

    def __init__(
        self, comm: Any, microbatches: int, chunks: int, cap: Any, splits: bool, placement: str
    ):
        self._placement = placement
        self._comm, self._microbatches, self._chunks = comm, microbatches, chunks
        self._cap = check_caps(cap, comm.size, chunks, f"rank {comm.rank}: Pipeline: max_live")
        self._splits = any(comm.allgather_object(splits))
        self.plan, self._left = self._compute(Costs()), STEPS
        self._seconds: dict[tuple[int, str], list[float]] = {}

    def _compute(self, costs: Costs) -> Plan:
        """Have rank 0 compute what all run: ranks may have registered different schedules."""
        size, microbatches, chunks = self._comm.size, self._microbatches, self._chunks
        where = self._cap, chunks, self._placement, self._splits

        def orders() -> list[list[Action]]:
            made = automatic(size, microbatches, costs, *where)
            return [made.actions(rank, size, microbatches, chunks) for rank in range(size)]

        parts = of_rank_0(self._comm, orders)
        return plan_of("auto", Placement(size, chunks, self._placement), parts, microbatches)

    def note(self, spans: Sequence[Span]) -> tuple[Plan, Costs] | None:
        """Take down a step; after the last one give what to run from now on; collective."""
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
