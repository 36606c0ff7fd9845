"""What can be seen of a schedule without running it: every microbatch once, in one order."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ScheduleError
from .actions import Action, B, F, I, W
from .messages import Step
from .placement import Placement

_BEFORE = {"B": F, "I": F, "W": I}


def check(parts: Sequence[Sequence[Step]], placement: Placement, microbatches: int) -> None:
    """Raise ScheduleError unless each microbatch goes once through each stage, in one order.

    Parameters
    ----------
    parts : sequence of sequence of Step
        The steps of each rank.
    placement : Placement
        Where the virtual stages lie.
    microbatches : int
        Number of microbatches.

    Raises
    ------
    ScheduleError
        With rank, virtual stage, step and reason.
    """
    forward: list[list[tuple[int, int]]] = [[] for _ in range(placement.stages)]
    backward: list[list[tuple[int, int]]] = [[] for _ in range(placement.stages)]
    for rank, part in enumerate(parts):
        at: dict[Action, int] = {}
        stages = [placement.stage(rank, chunk) for chunk in range(placement.chunks)]
        for index, (action, _, _) in enumerate(part):
            wrong = _misplaced(action, at)
            if wrong:
                raise ScheduleError(wrong, rank=rank, stage=stages[action.chunk], step=index)
            at[action] = index
            if action.kind != "W":
                orders = forward if action.kind == "F" else backward
                orders[stages[action.chunk]].append((action.microbatch, index))
        _check_complete(at, placement, rank, microbatches, len(part))
    for stage in range(1, placement.stages):
        _check_order(forward, stage - 1, stage, placement, parts)
        _check_order(backward, stage, stage - 1, placement, parts)


def _misplaced(action: Action, at: dict[Action, int]) -> str | None:
    """Give what is wrong with an action after those that stand in `at`."""
    if action in at:
        return f"{action} is done again: step {at[action]} did it"
    microbatch, chunk, kind = action
    if kind == "F":
        return None
    needed = _BEFORE[kind](microbatch, chunk)
    if needed not in at:
        return f"{action} comes before {needed}"
    other = I(microbatch, chunk) if kind == "B" else B(microbatch, chunk)
    if other in at:
        return f"{action} is done again: step {at[other]}, {other}, has computed that gradient"
    return None


def _check_complete(
    at: dict[Action, int], placement: Placement, rank: int, microbatches: int, end: int
) -> None:
    """Raise ScheduleError if an action of the rank is missing."""
    for chunk in range(placement.chunks):
        for microbatch in range(microbatches):
            where = (microbatch, chunk)
            split = I(*where) in at
            if F(*where) not in at:
                missing = f"{F(*where)}"
            elif not split and B(*where) not in at:
                missing = f"{B(*where)}, or {I(*where)} and {W(*where)}"
            elif split and W(*where) not in at:
                missing = f"{W(*where)}: {I(*where)} is only the first half of backward"
            else:
                continue
            stage = placement.stage(rank, chunk)
            raise ScheduleError(f"ends without {missing}", rank=rank, stage=stage, step=end)


def _check_order(
    orders: list[list[tuple[int, int]]],
    source: int,
    target: int,
    placement: Placement,
    parts: Sequence[Sequence[Step]],
) -> None:
    """Raise ScheduleError if a stage takes messages in another order than they are sent."""
    (giver, _), (taker, _) = placement.owner(source), placement.owner(target)
    if giver == taker:
        return  # handed over in memory: no message that others could be taken for
    for number, (sent, taken) in enumerate(zip(orders[source], orders[target])):
        if sent[0] != taken[0]:
            step = parts[taker][taken[1]]
            assert step.receive is not None
            raise ScheduleError(
                f"{step.action} takes message {number} from rank {giver} for its "
                f"{step.receive.kind}, but that is of microbatch {sent[0]}, sent by step "
                f"{sent[1]}: messages of an edge keep their order",
                rank=taker,
                stage=target,
                step=taken[1],
            )
