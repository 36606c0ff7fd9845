"""How many messages can be under way: sent and not yet used, at any speed of any rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from .messages import Message, Step


class Outstanding:
    """Bounds on the messages that are sent and not yet used, from who must wait for whom.

    A message may already be sent when its target begins step i unless its sender had to wait for
    step i or a later one.  So of each message it keeps the first step of the target that it cannot
    follow, and the step that uses it: a vector clock gives the one, the order of steps the other.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    """

    def __init__(self, ranks: int):
        self._clock = [[0] * ranks for _ in range(ranks)]
        self._sent: dict[Message, list[int]] = {}
        self._lives: dict[tuple[int, int, int, str], list[tuple[int, int]]] = {}

    @property
    def messages(self) -> int:
        """Messages between ranks."""
        return sum(map(len, self._lives.values()))

    def see(self, rank: int, index: int, step: Step) -> None:
        """Note a step; steps come in an order in which they can run."""
        clock = self._clock[rank]
        message = step.receive
        if message is not None and not message.local:
            known = self._sent.pop(message)
            life = known[rank], index
            self._lives.setdefault(message.edge, []).append(life)
            clock = self._clock[rank] = list(map(max, clock, known))
        clock[rank] = index + 1
        for message in step.sends:
            if not message.local:
                self._sent[message] = list(clock)

    def into(self, rank: int) -> int:
        """Give how many messages to `rank` can be outstanding at a time."""
        edges = (lives for edge, lives in self._lives.items() if edge[1] == rank)
        return _most([life for lives in edges for life in lives])

    def fullest_edge(self) -> int:
        """Give how many messages of one edge can be outstanding at a time, on the fullest."""
        return max(map(_most, self._lives.values()), default=0)


def _most(lives: Iterable[tuple[int, int]]) -> int:
    """Give how many lives, first to last step with both ends counted, share a step at most."""
    lives = list(lives)
    begins = sorted(first for first, _ in lives)
    most = 0
    for used, (_, last) in enumerate(sorted(lives, key=lambda life: life[1])):
        begun = bisect_left(begins, last + 1)
        most = max(most, begun - used)
    return most
