"""The short calibration of a job: α, β and γ within milliseconds, and times predicted from them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np

from .backends.base import Backend
from .errors import CollectiveTimeout, ConfigError, ScheduleError
from .measure import Calibration, add_cost, median
from .pipelining import Pipelining
from .schedule.contract import COLLECTIVES
from .schedule.cost import Link, cost
from .schedule.registry import Choice, Groups

VARIABLE = "MPIDIST_CALIBRATE"
SECONDS = 0.02  # for all pairs and lengths together; with the rest well below 50 ms
SMALL, LARGE = 8, 128 << 10
MOST_RANKS = 16  # above, running through a schedule takes too long for a call to wait for
_MOST_PIECES = 16
_MOST_TRIPS = 50
_LAST = 1  # first byte of the message of the last round trip
_TAG = 0  # as of blocking collectives: one is under way at a time, in the same order everywhere


def from_environment(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Give what ``MPIDIST_CALIBRATE`` says, or None.

    Raises
    ------
    ConfigError
        If it is neither 0 nor 1.
    """
    text = environ.get(VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}={text!r}: allowed are 0 and 1")
    return text == "1" if text else None


def calibrate_shortly(backend: Backend, groups: Groups, deadline: float | None) -> Calibration:
    """Measure between rank 0, another rank of its node and one of another node; collective.

    Parameters
    ----------
    backend : Backend
        Moves the messages.
    groups : tuple of tuple of int
        Which ranks share a node.
    deadline : float or None
        Of every wait.

    Returns
    -------
    Calibration
        That of rank 0, on every rank.

    Raises
    ------
    CollectiveTimeout
        If a message did not come before the deadline.
    """
    near, far = groups[0][1:2], groups[1][:1] if len(groups) > 1 else ()
    pairs = [*near, *far]
    share = SECONDS / max(2 * len(pairs), 1)
    rates = [_rates(backend, peer, share, deadline) for peer in pairs]
    gamma = add_cost(LARGE) if backend.rank == 0 else 0.0
    first = rates[0] if rates else (0.0, 0.0)
    across = rates[-1] if near and far else (-1.0, -1.0)
    figures = np.array([*first, gamma, *across])
    _spread(backend, figures, deadline)
    alpha, beta, gamma, far_alpha, far_beta = figures.tolist()
    if far_alpha < 0:
        return Calibration(alpha, beta, gamma)
    return Calibration(alpha, beta, gamma, far_alpha, far_beta)


def _rates(
    backend: Backend, peer: int, share: float, deadline: float | None
) -> tuple[float, float]:
    """Give α and β between rank 0 and `peer`; only rank 0's have a meaning."""
    small = _ping_pong(backend, peer, SMALL, share, deadline)
    large = _ping_pong(backend, peer, LARGE, share, deadline)
    return small, max(large - small, 0.0) / LARGE


def _ping_pong(
    backend: Backend, peer: int, nbytes: int, share: float, deadline: float | None
) -> float:
    """Give the seconds one way; rank 0 says with each message whether it is the last."""
    if backend.rank not in (0, peer):
        return 0.0
    data = np.zeros(nbytes, np.uint8)
    if backend.rank == peer:
        while not data[0]:
            _move(backend, backend.irecv, data, 0, deadline)
            _move(backend, backend.isend, data, 0, deadline)
        return 0.0
    times: list[float] = []
    begun = perf_counter()
    while not data[0]:
        before = perf_counter()
        if len(times) == _MOST_TRIPS or (len(times) > 1 and before - begun > share):
            data[0] = _LAST
        _move(backend, backend.isend, data, peer, deadline)
        _move(backend, backend.irecv, data, peer, deadline)
        times.append(perf_counter() - before)
    return median(times[1:]) / 2  # the first meets what is cold


def _spread(backend: Backend, figures: np.ndarray, deadline: float | None) -> None:
    """Bring rank 0's figures to all."""
    if backend.rank:
        _move(backend, backend.irecv, figures, 0, deadline)
        return
    for peer in range(1, backend.size):
        _move(backend, backend.isend, figures, peer, deadline)


def _move(
    backend: Backend,
    post: Callable[..., object],
    data: np.ndarray,
    peer: int,
    deadline: float | None,
) -> None:
    request = post(data, peer, _TAG)
    if not backend.wait(request.test, deadline):  # type: ignore[attr-defined]
        raise CollectiveTimeout(
            f"rank {backend.rank}: the calibration's message with rank {peer} has not come",
            collective="calibrate",
        )


def scaled_down(groups: Groups) -> Groups:
    """Give as many nodes, up to four, with ranks that are few enough to be run through.

    Examples
    --------
    >>> many = tuple(tuple(range(9 * k, 9 * k + 9)) for k in range(8))
    >>> [len(group) for group in scaled_down(many)]
    [4, 4, 4, 4]
    """
    nodes = min(len(groups), 4)
    each = min(max(map(len, groups)), MOST_RANKS // nodes)
    return tuple(tuple(range(each * k, each * k + each)) for k in range(nodes))


class Model:
    """Predicts times by the cost model; each figure is worked out once.

    Parameters
    ----------
    calibration : Calibration
        The constants.
    groups : tuple of tuple of int
        Which ranks share a node.
    pipelining : Pipelining
        How long blocks are cut, as in a run.
    """

    def __init__(self, calibration: Calibration, groups: Groups, pipelining: Pipelining):
        self.calibration, self.groups = calibration, groups
        self._size = sum(map(len, groups))
        self.small = groups if self._size <= MOST_RANKS else scaled_down(groups)
        self._pipelining = pipelining
        self._known: dict[tuple[str, str, int], float | None] = {}

    def seconds(self, collective: str, choice: Choice, nbytes: int) -> float | None:
        """Give the time of an algorithm at the power of two next to `nbytes`; None if too big.

        The schedule of at most 16 ranks is run through, in at most 16 segments.
        """
        return None if self._size > MOST_RANKS else self.seconds_of_few(collective, choice, nbytes)

    def seconds_of_few(self, collective: str, choice: Choice, nbytes: int) -> float | None:
        """Give that time; of more than 16 ranks as if there were fewer, on fewer nodes."""
        bucket = 1 << round(math.log2(max(nbytes, 1)))
        key = (collective, choice.name, bucket)
        if key not in self._known:
            self._known[key] = self._run_through(collective, choice, bucket)
        return self._known[key]

    def _run_through(self, collective: str, choice: Choice, nbytes: int) -> float | None:
        known, groups = self.calibration, self.small
        size, link = sum(map(len, groups)), None
        if known.far_alpha is not None and known.far_beta is not None:
            link = Link(known.far_alpha, known.far_beta)
        count = max(choice.algorithm.block_count(size, groups=groups), 1)
        largest, nodes = -(-nbytes // count), len(groups)
        pieces, window = self._pipelining.of(choice.algorithm, size, nodes, count, largest)
        try:
            return cost(
                collective,
                choice,
                size,
                0 if COLLECTIVES[collective].idempotent else nbytes,
                alpha=known.alpha,
                beta=known.beta,
                gamma=known.gamma,
                arity=choice.arity or 2,
                groups=groups,
                segments=min(pieces, _MOST_PIECES),
                window=window,
                link=link,
            ).seconds
        except ScheduleError:
            return None
