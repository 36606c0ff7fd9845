"""The steps of all ranks in an order in which they can run; or the deadlock among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...errors import ScheduleError
from .actions import Action, B, F, I, Placement, W
from .messages import Message, Step


def peak_live(actions: Iterable[Action]) -> int:
    """Return the largest number of live activations while a rank runs these actions.

    An activation lives from F to the last of I and W, or to B.  Other ranks cannot change the
    number: it follows from the order of the rank's own actions.
    """
    live = peak = 0
    for action in actions:
        if action.kind == "F":
            live += 1
            peak = max(peak, live)
        elif action.kind != "I":
            live -= 1
    return peak


def walk(parts: Sequence[Sequence[Step]], placement: Placement) -> Iterator[tuple[int, int, Step]]:
    """Yield (rank, index, step) of all ranks' steps in an order in which they can run.

    Each comes after the earlier steps of its rank and after the step that sends its message; sends
    do not block.  The time of the walk is proportional to the number of steps.  ScheduleError if
    ranks wait for each other in a cycle; the message names them all.
    """
    sent: set[Message] = set()
    waiting: dict[Message, int] = {}
    at = [0] * len(parts)  # the step at which each rank stands
    # A rank runs until it needs a message not yet sent, and is woken by the step that sends it: no
    # rank is looked at in vain, and any order of waking gives the same messages.
    ready = list(reversed(range(len(parts))))
    while ready:
        rank = ready.pop()
        part = parts[rank]
        for index in range(at[rank], len(part)):
            step = part[index]
            if step.receive is not None and step.receive not in sent:
                waiting[step.receive] = rank
                at[rank] = index
                break
            yield rank, index, step
            for message in step.sends:
                sent.add(message)
                if message in waiting:
                    ready.append(waiting.pop(message))
    if waiting:
        raise _deadlock(parts, placement, at, {rank: m for m, rank in waiting.items()})


def _deadlock(
    parts: Sequence[Sequence[Step]],
    placement: Placement,
    at: list[int],
    needs: dict[int, Message],
) -> ScheduleError:
    """Return the error that names the cycle: each rank, its step and the message it waits for.

    `at` has the number of the step at which each rank stands, `needs` the message that it needs.
    """
    rank = min(needs)
    seen: list[int] = []
    while rank in needs and rank not in seen:
        seen.append(rank)
        rank = needs[rank].source
    # From any waiting rank on to the one it waits for: that ends in the cycle, or at a rank that
    # has ended and will not send.  The text begins with the lowest rank of the cycle.
    circle = seen[seen.index(rank) :] if rank in seen else seen
    circle = circle[circle.index(min(circle)) :] + circle[: circle.index(min(circle))]
    links = []
    for rank in circle:
        message, action = needs[rank], parts[rank][at[rank]].action
        sender = next(
            (i for i, step in enumerate(parts[message.source]) if message in step.sends), None
        )
        by = "never sends it" if sender is None else f"sends it by step {sender}"
        by += "" if sender is None else f", {parts[message.source][sender].action}"
        who = "this rank itself" if message.local else f"rank {message.source}"
        links.append(
            f"rank {rank} at step {at[rank]}, {action}, waits for the {message.kind} from {who}, "
            f"which {by}"
        )
    first = circle[0]
    stage = placement.stage(first, parts[first][at[first]].action.chunk)
    return ScheduleError("deadlock: " + "; ".join(links), rank=first, stage=stage, step=at[first])


_BEFORE = {"B": F, "I": F, "W": I}


def check(parts: Sequence[Sequence[Step]], placement: Placement, microbatches: int) -> None:
    """Raise ScheduleError unless each microbatch passes every stage once forward and once back.

    Neighbouring stages on two ranks must also take the microbatches in the same order.  The error
    has rank, virtual stage, step and reason.
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
    """Return as text why an action cannot come next on its rank; None if it can.

    `at` has the earlier actions of the rank, with the numbers of their steps.
    """
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
    """Raise ScheduleError if an action of the rank is missing.

    `at` has the rank's actions with the numbers of their steps; `end` is the number of all steps.
    """
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
    """Raise ScheduleError if stage `target` uses messages in another order than `source` sends.

    `orders` has for each virtual stage its (microbatch, number of the step), in order.
    """
    (giver, _), (taker, _) = placement.owner(source), placement.owner(target)
    if giver == taker:
        return  # passed in memory: there are no messages to mix up
    for number, (sent, taken) in enumerate(zip(orders[source], orders[target])):
        if sent[0] != taken[0]:
            step = parts[taker][taken[1]]
            assert step.receive is not None
            raise ScheduleError(
                f"{step.action} takes message {number} from rank {giver} for its "
                f"{step.receive.kind}, but that is of microbatch {sent[0]}, sent by step "
                f"{sent[1]}: messages from one stage to another keep their order",
                rank=taker,
                stage=target,
                step=taken[1],
            )
