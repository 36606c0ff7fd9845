"""``automatic``: a schedule computed for the stages' own times, under a cap on memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Integral
from typing import Any

from ...arguments import whole
from ...errors import InvalidArgument, ScheduleError, UnknownName
from .actions import SHAPES, Action, B, F, I, Placement, W
from .gantt import Timeline
from .messages import with_messages
from .schedule import PipelineSchedule, schedules
from .simulate import Costs, Times, as_costs, run
from .walk import check


@dataclass(frozen=True)
class PlannerRule:
    """The rule by which a free rank chooses its next action."""

    # Kinds of actions, the most urgent first; without halves of backward, I stands for B.
    order: str = "IFW"
    # Largest time by which an action may delay a more urgent one that could begin before its end,
    # as a share of its own time; with 1 a free rank never waits.
    patience: float = 1.0
    # On rank r of p, forward is at most ``lead * (p - r)`` microbatches ahead of backward of the
    # same stage; None: no limit.
    lead: int | None = None


class Planner:
    """Simulates the ranks, and records the actions that they choose.

    `caps` has the largest number of live activations on each rank, ≥ its number of chunks; `splits`
    is whether backward is split into I and W, else it is B.
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        caps: Sequence[int],
        splits: bool,
        rule: PlannerRule,
    ):
        self.placement, self.microbatches = placement, microbatches
        self.caps, self.rule = caps, rule
        self.splits, self.delay = splits, costs.message
        times = costs.table(placement.stages)
        self.times = {"F": times["F"], "I": times["I" if splits else "B"], "W": times["W"]}
        self.orders: list[list[Action]] = [[] for _ in range(placement.ranks)]
        self.live = [0] * placement.ranks
        # The next microbatch of each kind and virtual stage: in order, and so are the messages.
        self.next = {kind: [0] * placement.stages for kind in "FIW"}
        self.arrived: dict[tuple[str, int, int], float] = {}
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(placement.ranks)]
        self.free = [0.0] * placement.ranks

    def run(self) -> list[list[Action]]:
        """Simulate all ranks, and return the list of actions of each."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            # What happens to a busy rank is seen at the end of its action, an event of its own.
            if now >= self.free[rank]:
                self._choose(now, rank)
        return self.orders

    def _choose(self, now: float, rank: int) -> None:
        """Begin the most urgent action that can begin on a free rank.

        None begins if it would delay a more urgent one by more than the rule's patience.
        """
        soonest = float("inf")  # at which a more urgent action could begin
        # Later chunks first: nearer to the loss, they free memory sooner.
        for kind, chunk in product(self.rule.order, reversed(range(self.placement.chunks))):
            stage = self.placement.stage(rank, chunk)
            at = self._possible_at(kind, rank, stage, chunk)
            took = self.times[kind][stage]
            if at > now:
                soonest = min(soonest, at)
            elif now + took - soonest <= self.rule.patience * took:
                self._begin(now, kind, rank, stage, chunk, took)
                return
        # Otherwise the arrival of a message wakes the rank.

    def _possible_at(self, kind: str, rank: int, stage: int, chunk: int) -> float:
        """Return the time from which the next action of a kind can run on a stage of a free rank.

        It is infinity if that is not known yet, or the cap or the rule's lead forbids the action.
        """
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
        # Room for the later chunks of microbatches on their way: none can get stuck.
        if self.live[rank] + (self.placement.chunks - 1 - chunk) >= self.caps[rank]:
            return never
        lead = self.rule.lead
        ahead = microbatch - self.next["I"][stage]
        if lead is not None and ahead >= lead * (self.placement.ranks - rank):
            return never
        return 0.0 if stage == 0 else self.arrived.get(("F", stage, microbatch), never)

    def _begin(self, now: float, kind: str, rank: int, stage: int, chunk: int, took: float) -> None:
        """Begin the next action of a kind, and record its end and the arrival of its message.

        `now` is the simulated time, `took` the time that the action takes.
        """
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


RULES = tuple(
    PlannerRule(order, patience, lead)
    for order, patience, lead in product(("IFW", "FIW"), (1.0, 0.5, 0.0), (None, 1))
)
"""The rules that :func:`automatic` tries."""


def automatic(
    size: int,
    microbatches: int,
    costs: Costs | Sequence[Times],
    cap: int | Sequence[int] | None = None,
    chunks: int = 1,
    placement: str = "loop",
    splits: bool = True,
) -> PipelineSchedule:
    """Compute a schedule for given times of F, I and W, stage by stage, under a memory cap.

    F is the forward of a microbatch, B its backward; I and W are the halves of B: the gradient of
    the stage's input, and that of its weights.

    List scheduling: all ranks are simulated, and a free rank takes the most urgent action that can
    begin and that the cap allows.  Several rules for urgency and waiting are tried, and so are the
    registered schedules that fit the cap and the placement, so the result is never longer than
    these.  The one with the shortest makespan wins, among equals that with the smallest sum of
    peaks of live activations.  The same arguments (and registered schedules) give the same schedule
    on every rank.

    Parameters
    ----------
    size, microbatches : int
        Numbers of ranks and of microbatches, each ≥ 1.
    costs : Costs or sequence
        Times of F, I and W for each virtual stage, and of a message.
    cap : int or sequence of int, optional
        Largest number of live activations (of a chunk for a microbatch) on a rank, one number for
        all or one for each; at least `chunks`.  By default ``size * chunks``: as many as 1F1B and
        ZB-H1 need with one chunk, and ZB-V with two.
    chunks : int
        Number of virtual stages on every rank.
    placement : {"loop", "v"}
        Which rank holds which virtual stage, see :class:`~mpidist.pipeline.Placement`.
    splits : bool
        Whether I and W may be used; otherwise only B.

    Returns
    -------
    PipelineSchedule
        The schedule ``"auto"``; it serves this size, number of microbatches and chunks only.

    Raises
    ------
    InvalidArgument
        If a number is not a whole one ≥ 1, or `cap` or `costs` does not fit.
    UnknownName
        If `placement` is neither "loop" nor "v".
    """
    for name, value in (("size", size), ("microbatches", microbatches), ("chunks", chunks)):
        whole(name, value)
    if placement not in SHAPES:
        raise UnknownName("placement", placement, SHAPES)
    place = Placement(size, chunks, placement)
    known, caps = as_costs(costs), check_caps(cap, size, chunks)
    best: tuple[float, int] | None = None
    chosen: list[list[Action]] = []
    for parts in _candidates(place, microbatches, known, caps, splits):
        steps = with_messages(parts, place)
        try:
            check(steps, place, microbatches)
            timeline = Timeline("auto", place, microbatches, run(steps, place, known))
        except ScheduleError:
            continue  # a wrong schedule that a user registered, and did not ask for here
        if any(peak > most for peak, most in zip(timeline.peak, caps)):
            continue
        rating = timeline.makespan, sum(timeline.peak)
        if best is None or rating < best:
            best, chosen = rating, parts
    return _schedule(chosen, place, microbatches)


def check_caps(cap: Any, size: int, chunks: int, name: str = "cap") -> list[int]:
    """Return a list with the cap of each rank.

    `cap` is one number for all ranks, or one for each, or None for ``size * chunks``;
    InvalidArgument, which begins with `name`, if it is none of these or below `chunks`.
    """
    caps = cap if isinstance(cap, (list, tuple)) else [size * chunks if cap is None else cap] * size
    for value in caps:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < chunks:
            raise InvalidArgument(
                f"{name}={cap!r}: expected whole numbers >= {chunks}, the chunks of a rank"
            )
    if len(caps) != size:
        raise InvalidArgument(
            f"{name}={cap!r}: expected one number, or one for each of {size} ranks"
        )
    return list(caps)


def _candidates(
    place: Placement, microbatches: int, costs: Costs, caps: list[int], splits: bool
) -> Iterator[list[list[Action]]]:
    """Yield each candidate schedule that "auto" compares, as a list of actions for each rank."""
    size, chunks = place.ranks, place.chunks
    # A lower cap can make a shorter schedule.
    lower = [min(cap, size * chunks) for cap in caps]
    for most in (caps, lower) if lower != caps else (caps,):
        for rule in RULES:
            yield Planner(place, microbatches, costs, most, splits, rule).run()
    for known in schedules():
        fits = known.any_chunks or known.chunks == chunks
        fits = fits and (known.placement == place.shape or chunks == 1)
        fits = fits and (splits or known.splits is False)
        if not fits or known.unsupported(size, microbatches, chunks) is not None:
            continue
        try:
            parts = [known.actions(rank, size, microbatches, chunks) for rank in range(size)]
        except Exception:  # a wrong schedule that a user registered, and did not ask for here
            continue
        yield parts


def _schedule(parts: list[list[Action]], place: Placement, microbatches: int) -> PipelineSchedule:
    """Return a schedule that yields these actions, one list for each rank."""

    def requires(size: int, number: int, chunks: int) -> str | None:
        if (size, number) == (place.ranks, microbatches):
            return None
        return (
            f"it was computed for {place.ranks} ranks and {microbatches} microbatches, "
            f"not for {size} and {number}"
        )

    def auto(rank: int, size: int, microbatches: int) -> Iterable[Action]:
        """Computed by list scheduling, for the stages' own times."""
        return parts[rank]

    splits = any(action.kind == "I" for part in parts for action in part)
    return PipelineSchedule("auto", auto, place.chunks, place.shape, splits, requires)
