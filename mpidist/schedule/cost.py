"""``cost``: the time of a schedule in the alpha-beta-gamma model.

A message of n bytes takes ``alpha + n * beta``, combining n bytes takes ``n * gamma``.  Every rank
has one port, full duplex: it sends one message and receives one message at a time, and combines one
at a time, when all messages of the round have come.  Copies cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InvalidArgument
from .prove import prepare
from .registry import Algorithm, Choice, Groups
from .rounds import Schedule, blocks
from .timed import Cost, Link, Timed

__all__ = ["Cost", "Link", "cost"]


def cost(
    collective: str,
    choice: str | Algorithm | Choice | Callable[..., Schedule],
    size: int,
    nbytes: int,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    root: int = 0,
    arity: int = 2,
    groups: Groups | None = None,
    segments: int = 1,
    window: int | None = None,
    link: Link | None = None,
) -> Cost:
    """Give the time that a schedule takes.

    Parameters
    ----------
    collective, choice, size, root, arity, groups, segments, window
        As of :func:`~mpidist.schedule.prove`.
    nbytes : int
        Bytes of the whole buffer.
    alpha : float
        Seconds per message.
    beta, gamma : float
        Seconds per byte sent, and per byte combined.
    link : Link, optional
        What messages between `groups` take instead, and one at a time for each group and
        direction; by default they are like others.

    Returns
    -------
    Cost
        Seconds and bytes.

    Raises
    ------
    ScheduleError
        If the schedule is wrong.

    Examples
    --------
    >>> cost("allreduce", "ring", 4, 1000, alpha=1.0, beta=0.0).seconds
    6.0
    """
    if nbytes < 0:
        raise InvalidArgument(f"nbytes={nbytes}: must be >= 0")
    for name, value in (("alpha", alpha), ("beta", beta), ("gamma", gamma)):
        if value < 0:
            raise InvalidArgument(f"{name}={value}: must be >= 0")
    _, machine = prepare(
        collective,
        choice,
        size,
        root,
        arity=arity,
        groups=groups,
        segments=segments,
        window=window,
        machine=Timed,
    )
    assert isinstance(machine, Timed)
    pieces = [
        piece.stop - piece.start
        for block in blocks(nbytes, max(machine.count // segments, 1))
        for piece in blocks(block.stop - block.start, segments)
    ]
    return machine.cost(pieces, (alpha, beta, gamma), groups or (tuple(range(size)),), link)
