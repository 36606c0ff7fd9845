"""List scheduling: every rank, when it is free, takes the most urgent action that it can."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from .actions import Action, B, F, I, W
from .costs import Costs
from .placement import Placement


@dataclass(frozen=True)
class Rule:
    """How a free rank chooses.

    Attributes
    ----------
    order : str
        Kinds of actions, the most urgent first.
    patience : float
        A less urgent action is not begun if a more urgent one is on its way and would then wait for
        longer than this part of it; 1 waits for nothing.
    lead : int or None
        Stage s goes at most ``lead * (p - s)`` microbatches ahead of its backward; None: no limit.
    """

    order: str = "IFW"
    patience: float = 1.0
    lead: int | None = None


class Planner:
    """Simulates the ranks, and writes down what they choose.

    Parameters
    ----------
    placement : Placement
        Where the virtual stages lie.
    microbatches : int
        Number of microbatches.
    costs : Costs
        Times of the actions.
    caps : sequence of int
        For each rank how many activations may be alive, ≥ the chunks it holds.
    splits : bool
        Backward in halves; else as B.
    rule : Rule
        How a free rank chooses.
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        caps: Sequence[int],
        splits: bool,
        rule: Rule,
    ):
        self.placement, self.microbatches = placement, microbatches
        self.caps, self.rule = caps, rule
        self.splits, self.delay = splits, costs.message
        times = costs.table(placement.stages)
        self.times = {"F": times["F"], "I": times["I" if splits else "B"], "W": times["W"]}
        self.orders: list[list[Action]] = [[] for _ in range(placement.ranks)]
        self.live = [0] * placement.ranks
        # For each virtual stage the next microbatch of each kind: in order, so that messages are.
        self.next = {kind: [0] * placement.stages for kind in "FIW"}
        self.arrived: dict[tuple[str, int, int], float] = {}
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(placement.ranks)]
        self.free = [0.0] * placement.ranks

    def run(self) -> list[list[Action]]:
        """Give the actions of each rank."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.free[rank]:
                self._choose(now, rank)
        return self.orders

    def _choose(self, now: float, rank: int) -> None:
        """Begin the most urgent action that can begin, unless it is worth to wait."""
        soonest = float("inf")
        # Later chunks first: what is nearer to the loss frees memory sooner.
        for kind, chunk in product(self.rule.order, reversed(range(self.placement.chunks))):
            stage = self.placement.stage(rank, chunk)
            at = self._possible_at(kind, rank, stage, chunk)
            took = self.times[kind][stage]
            if at > now:
                soonest = min(soonest, at)
            elif now + took - soonest <= self.rule.patience * took:
                self._begin(now, kind, rank, stage, chunk, took)
                return
        # Else it is woken when a message comes.

    def _possible_at(self, kind: str, rank: int, stage: int, chunk: int) -> float:
        """Give when the next action of a kind can begin, as far as is known; else infinity."""
        microbatch, never = self.next[kind][stage], float("inf")
        if microbatch >= self.microbatches:
            return never
        if kind == "W":
            return 0.0 if self.splits and microbatch < self.next["I"][stage] else never
        if kind == "I":
            if microbatch >= self.next["F"][stage]:
                return never
            if stage == self.placement.stages - 1:
                return 0.0
            return self.arrived.get(("I", stage, microbatch), never)
        # Room is kept for the later chunks of microbatches on their way: none can be stuck.
        if self.live[rank] + (self.placement.chunks - 1 - chunk) >= self.caps[rank]:
            return never
        lead = self.rule.lead
        ahead = microbatch - self.next["I"][stage]
        if lead is not None and ahead >= lead * (self.placement.ranks - rank):
            return never
        return 0.0 if stage == 0 else self.arrived.get(("F", stage, microbatch), never)

    def _begin(self, now: float, kind: str, rank: int, stage: int, chunk: int, took: float) -> None:
        """Write an action down, with what follows from it."""
        microbatch = self.next[kind][stage]
        self.next[kind][stage] += 1
        made: Action
        if kind == "F":
            made = F(microbatch, chunk)
            self.live[rank] += 1
        elif kind == "W" or not self.splits:
            made = W(microbatch, chunk) if self.splits else B(microbatch, chunk)
            self.live[rank] -= 1
        else:
            made = I(microbatch, chunk)
        self.orders[rank].append(made)
        end = self.free[rank] = now + took
        heapq.heappush(self.events, (end, rank))
        target = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= target < self.placement.stages:
            owner = self.placement.owner(target)[0]
            at = end if owner == rank else end + self.delay
            self.arrived[kind, target, microbatch] = at
            heapq.heappush(self.events, (at, owner))
