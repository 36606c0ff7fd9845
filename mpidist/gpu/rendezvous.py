"""Whether a schedule runs where no message is kept: both its ends must be under way together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..plan import Strands, Written
from ..schedule.rounds import Copy, Send, Step


def why_stuck(written: Sequence[Written]) -> str | None:
    """Play the rounds of all ranks; say which ranks would wait for ever, or give None.

    A round is over when each of its messages has met its other end; strands go one after another.

    Parameters
    ----------
    written : sequence
        The schedule of every rank.
    """
    left = [deque(_flat(one)) for one in written]
    now = [_open(rounds) for rounds in left]
    moved = True
    while moved:
        moved = False
        for rank, (sends, _) in enumerate(now):
            for peer in [p for p, n in sends.items() if n]:
                wanted = now[peer][1]
                met = min(sends[peer], wanted.get(rank, 0))
                if met:
                    sends[peer] -= met
                    wanted[rank] -= met
                    moved = True
        for rank, rounds in enumerate(left):
            while not any(any(side.values()) for side in now[rank]) and rounds:
                now[rank] = _open(rounds)
                moved = True
    stuck = [rank for rank, sides in enumerate(now) if any(any(s.values()) for s in sides)]
    if not stuck:
        return None
    return f"ranks {', '.join(map(str, stuck))} would wait for each other"


def _flat(written: Written) -> list[tuple[Step, ...]]:
    found: list[tuple[Step, ...]] = []
    for item in written:
        if isinstance(item, Strands):
            for one in item.strands:
                found += _flat(one)
        else:
            found.append(item)
    return found


def _open(rounds: deque[tuple[Step, ...]]) -> tuple[dict[int, int], dict[int, int]]:
    """Take the next round: how many messages go to each rank, and come from each."""
    sends: dict[int, int] = {}
    gets: dict[int, int] = {}
    for step in rounds.popleft() if rounds else ():
        if not isinstance(step, Copy):
            side = sends if isinstance(step, Send) else gets
            side[step.peer] = side.get(step.peer, 0) + 1
    return sends, gets
