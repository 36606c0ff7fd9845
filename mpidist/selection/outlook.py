"""An outlook: what the algorithms of messages would take on a job that is not here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InvalidArgument, ScheduleError, Unsupported
from ..schedule.clocks import Rates
from ..schedule.contract import COLLECTIVES
from ..schedule.cost import MANY, Cost, Link, timed, together
from ..schedule.model import Messages
from ..schedule.ranks import Unfit
from ..schedule.registry import Algorithm, Groups, algorithms
from ..schedule.score import messages_about

MOST = 1 << 22
"""Ranks, which take about 1.2 kB each."""
ONE_BY_ONE = 300_000
"""Messages that run one by one, in about 10 seconds."""
WAITING = 10_000_000
"""Messages times those of them that wait at a time, each of which takes about a microsecond."""


@dataclass(frozen=True)
class Outlook:
    """What one algorithm would take.

    `rounds`, `messages` and `nbytes` are the most of any rank: what it sends.
    """

    algorithm: str  # its name
    why: str = ""  # there are no times: it cannot serve the job, or has no pattern
    seconds: float | None = None
    rounds: int | None = None
    messages: int | None = None
    nbytes: int | None = None


def nodes_of(ranks: int, nodes: int) -> Groups | None:
    """Return the ranks of each node, equally many that follow each other; None for one node.

    Raises InvalidArgument if the nodes do not divide the ranks.
    """
    if ranks < 1 or nodes < 1:
        raise InvalidArgument(f"{ranks} ranks on {nodes} nodes: expected 1 or more of each")
    if nodes > ranks or ranks % nodes:
        raise InvalidArgument(
            f"{ranks} ranks on {nodes} nodes: expected nodes with equally many ranks each"
        )
    each = ranks // nodes
    if nodes == 1:
        return None
    return tuple(tuple(range(first, first + each)) for first in range(0, ranks, each))


def outlook(
    collective: str,
    nbytes: int,
    ranks: int,
    nodes: int = 1,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    link: Link | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> list[Outlook]:
    """Return what each algorithm of messages would take: the fastest first, then those without.

    `nbytes` are those of the whole buffer; the first ranks are on node 0.  The other numbers are as
    for :func:`~mpidist.schedule.cost.cost`: of messages within a node, and between nodes by `link`.
    ``on_step()`` is called after each algorithm.  InvalidArgument if the nodes do not divide the
    ranks, with more than `MOST` ranks, or so many bytes that a rank's count could overflow.
    """
    if ranks > MOST:
        raise InvalidArgument(f"{ranks} ranks: expected at most {MOST}")
    if nbytes * ranks >= 1 << 62:
        most = ((1 << 62) - 1) // ranks
        raise InvalidArgument(f"{nbytes} bytes on {ranks} ranks: expected at most {most} bytes")
    groups = nodes_of(ranks, nodes)
    if COLLECTIVES[collective].idempotent:
        nbytes = 0
    rates = Rates(alpha, beta, gamma)
    if groups is not None and link is not None:
        rates = Rates(alpha, beta, gamma, link.alpha, link.beta, True)
    found = []
    for algorithm in algorithms(collective):
        found.append(_one(algorithm, nbytes, ranks, groups, rates))
        on_step()
    return sorted(found, key=lambda one: (one.seconds is None, one.seconds))


def _one(
    algorithm: Algorithm, nbytes: int, ranks: int, groups: Groups | None, rates: Rates
) -> Outlook:
    if algorithm.local and groups is None:
        return Outlook(algorithm.name, "one node: nothing is between nodes")
    if (reason := algorithm.unsupported(ranks, groups)) is not None:
        return Outlook(algorithm.name, reason)
    straight = Messages.straight(rates.alpha, rates.beta, rates.gamma)
    link = Link(rates.far_alpha, rates.far_beta) if rates.linked else None
    try:
        return _taken(algorithm, together(algorithm, ranks, nbytes, rates, groups=groups))
    except Unfit as unfit:
        why = f"no pattern: {unfit}"
    except Unsupported as error:
        return Outlook(algorithm.name, str(error))
    if ranks > MANY:
        return Outlook(algorithm.name, f"{why}; ranks run one by one up to {MANY:,}")
    messages, waiting = messages_about(algorithm, ranks, groups)
    if messages > ONE_BY_ONE or messages * waiting > WAITING:
        return Outlook(algorithm.name, f"{why}; about {messages:,} messages are too many apart")
    try:
        taken = timed(
            algorithm.collective, algorithm, ranks, nbytes, straight, groups=groups, link=link
        )
    except ScheduleError as error:
        return Outlook(algorithm.name, str(error))
    return _taken(algorithm, taken)


def _taken(algorithm: Algorithm, cost: Cost) -> Outlook:
    figures = cost.rounds, max(cost.messages), max(cost.sent)
    return Outlook(algorithm.name, "", cost.seconds, *figures)
