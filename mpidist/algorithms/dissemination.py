"""Dissemination: in round k everyone tells the rank 2^k to the right all that it has heard."""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Reduce, Round, Send
from .relabel import powers


@algorithm("barrier", "dissemination")
def barrier_dissemination(rank: int, size: int) -> Iterator[Round]:
    """After ceil(lg p) rounds everyone has heard, directly or not, from everyone.

    Rounds: ceil(lg p).  Bytes per rank: ceil(lg p) empty messages.
    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17
    (1988).

    What rank 0 of 5 hears of, one column a round::

        4 --> 0    3,2 --> 0    1 --> 0
    """
    for distance in powers(size):
        yield Send((rank + distance) % size), Reduce((rank - distance) % size)
