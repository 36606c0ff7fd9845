"""Speeds of links: inside each node, and between nodes, measured by messages there and back."""

from __future__ import annotations

import itertools
import socket
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from .measure import Calibration, add_cost, median

SMALL, LARGE = 8, 1 << 20
TRIPS = 9  # counted, after two that are not
MOST_PAIRS = 28  # of nodes: all of 8; of more nodes each with the next


@dataclass(frozen=True)
class LinkSpeed:
    """What was measured between two ranks.

    Attributes
    ----------
    first, second : str
        The hosts; equal inside a node.
    alpha : float
        Seconds of an empty message, one way.
    beta : float
        Seconds per byte.
    """

    first: str
    second: str
    alpha: float
    beta: float

    @property
    def inside(self) -> bool:
        """Whether both ranks share a node."""
        return self.first == self.second


def pairs_of(groups: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """Give the pairs of ranks that are measured: two of each node, then one of each two nodes."""
    inside = [(group[0], group[1]) for group in groups if len(group) > 1]
    first = [group[0] for group in groups]
    every = list(itertools.combinations(first, 2))
    if len(every) > MOST_PAIRS:
        every = [*zip(first, first[1:]), (first[-1], first[0])]
    return inside + every


def measure_links(comm: Any) -> tuple[list[LinkSpeed], Calibration]:
    """Measure the links of a communicator; collective.

    Returns
    -------
    list of LinkSpeed
        The same on every rank.
    Calibration
        Their medians, inside nodes and between them, as the cost model takes them; γ is that of the
        slowest rank.
    """
    hosts = comm.allgather_object(socket.gethostname())
    found = [
        LinkSpeed(hosts[a], hosts[b], *_speed(comm, a, b))
        for a, b in pairs_of(comm.topology.groups)
    ]
    inside = [link for link in found if link.inside] or found
    across = [link for link in found if not link.inside]
    gamma = float(comm.allreduce(add_cost(), op="max"))
    near = _middle(inside) if inside else (0.0, 0.0)
    if not across or inside == across:
        return found, Calibration(*near, gamma)
    return found, Calibration(*near, gamma, *_middle(across))


def _middle(links: list[LinkSpeed]) -> tuple[float, float]:
    return median([link.alpha for link in links]), median([link.beta for link in links])


def _speed(comm: Any, first: int, second: int) -> tuple[float, float]:
    """Give α and β between two ranks, on every rank."""
    small = _there_and_back(comm, first, second, SMALL)
    large = _there_and_back(comm, first, second, LARGE)
    figures = np.array([small, max(large - small, 0.0) / LARGE])
    alpha, beta = comm.broadcast(figures, root=first).tolist()
    return alpha, beta


def _there_and_back(comm: Any, first: int, second: int, nbytes: int) -> float:
    """Give the seconds of a message one way; only the first rank's have a meaning."""
    comm.barrier()
    if comm.rank not in (first, second):
        return 0.0
    data, times = np.zeros(nbytes, np.uint8), []
    for _ in range(TRIPS + 2):
        begun = perf_counter()
        if comm.rank == first:
            comm.send(data, second)
            comm.recv(data, second)
        else:
            comm.recv(data, first)
            comm.send(data, first)
        times.append(perf_counter() - begun)
    return median(times[2:]) / 2
