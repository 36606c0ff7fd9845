"""Dissemination: in round k each of p ranks notifies the rank 2^k to its right."""

from collections.abc import Iterator

from ..schedule.registry import algorithm
from ..schedule.rounds import Reduce, Round, Send
from .relabel import powers


@algorithm("barrier", "dissemination")
def barrier_dissemination(rank: int, size: int) -> Iterator[Round]:
    """After ceil(lg p) rounds every rank has been notified, directly or indirectly, by all others.

    Rounds: ceil(lg p).  Bytes per rank: ceil(lg p) empty messages.
    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17
    (1988).

    The ranks that rank 0 of 5 hears of, one column per round::

        4 --> 0    3,2 --> 0    1 --> 0
    """
    for distance in powers(size):
        yield Send((rank + distance) % size), Reduce((rank - distance) % size)
