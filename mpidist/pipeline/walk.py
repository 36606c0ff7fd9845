"""All ranks' steps in an order in which they can run; or the circle in which they wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import ScheduleError
from .messages import Message, Step
from .placement import Placement


def walk(parts: Sequence[Sequence[Step]], placement: Placement) -> Iterator[tuple[int, int, Step]]:
    """Run through the steps of all ranks: each after those before it and after its message.

    Sends block nobody and receives are posted: a step waits for its own message only.  Takes time
    in proportion to the number of steps.

    Yields
    ------
    rank, index, step : int, int, Step
        Each step of each rank once.

    Raises
    ------
    ScheduleError
        If some wait for each other: with the first of them, and the whole circle.
    """
    sent: set[Message] = set()
    waiting: dict[Message, int] = {}
    at = [0] * len(parts)
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
    """Give the error that names the circle: who waits for what of whom."""
    rank = min(needs)
    seen: list[int] = []
    while rank in needs and rank not in seen:
        seen.append(rank)
        rank = needs[rank].source
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
