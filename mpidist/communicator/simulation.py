"""Run a function on simulated ranks: threads of this process, no MPI."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..backends.simulated import Faults, SimulatedBackend, run_group
from ..selection.config import CollectiveConfig
from ..topology import pretended_hosts
from .communicator import Communicator


def run_simulated(
    size: int,
    fn: Callable[[Communicator], Any],
    *,
    timeout: float = 30.0,
    config: CollectiveConfig | None = None,
    faults: Faults | None = None,
    nodes: Sequence[object] | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``fn(comm)`` on every rank of a simulated communicator.

    Parameters
    ----------
    size : int
        Number of ranks.
    fn : callable
        Function of the rank's :class:`Communicator`.
    timeout : float
        Deadline of the whole run in seconds.
    config, faults, nodes
        See :class:`Communicator` and :meth:`SimulatedBackend.create_group`.
    **options
        Further arguments of :class:`Communicator`.

    Returns
    -------
    list
        Results of `fn`, by rank.

    Raises
    ------
    Exception
        The error of the lowest rank with a failure of its own; the message begins with the rank.
    """
    if nodes is None:
        nodes = pretended_hosts(size, os.environ)
    backends = SimulatedBackend.create_group(size, faults=faults, nodes=nodes)
    return run_group(backends, lambda b: fn(Communicator(b, config, **options)), timeout)
