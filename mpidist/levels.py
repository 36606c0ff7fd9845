"""Collectives on two levels, inside nodes and between them, of two sub-communicators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .prepare import Prepared

if TYPE_CHECKING:
    from .communicator import Communicator

Levels = tuple["Communicator", "Communicator"]
TWO_LEVEL = ("allreduce", "reduce", "broadcast")


def make_levels(comm: Communicator) -> Levels:
    """Make the communicator of this rank's node, and the one of its peers on the other nodes.

    Each carries the strategies of its level: ``local_…`` of the configuration become those of the
    first, ``global_…`` those of the second.
    """
    from .communicator import Communicator

    groups = comm.config.groups(comm.topology.groups)
    node = next(i for i, group in enumerate(groups) if comm.rank in group)
    index = groups[node].index(comm.rank)
    levels = []
    for color, key, level in ((node, index, "local"), (index, node, "global")):
        backend = comm.backend.split(color, key)
        assert backend is not None
        config = comm.config.at_level(level).replace(timeout=comm.timeout)
        levels.append(Communicator(backend, config, **comm._options, **comm._calibrated()))
    return levels[0], levels[1]


def compose(comm: Communicator, levels: Levels, prepared: Prepared) -> Any:
    """Serve allreduce, reduce or broadcast as one collective on each level."""
    call = prepared.call
    groups = comm.config.groups(comm.topology.groups)
    root_node = next(i for i, group in enumerate(groups) if call.root in group)
    root_index = groups[root_node].index(call.root)
    local, across = levels
    if call.collective == "allreduce":
        local.allreduce(call.x, call.op, out=call.out)  # type: ignore[arg-type]
        across.allreduce(call.out, call.op, out=call.out)  # type: ignore[arg-type]
    elif call.collective == "reduce":
        part = local.reduce(call.x, call.op, root=root_index)  # type: ignore[arg-type]
        if local.rank == root_index:
            across.reduce(part, call.op, root=root_node, out=call.out)  # type: ignore[arg-type]
    else:
        data = call.out
        assert data is not None
        if call.x is not None and not call.in_place:
            np.copyto(data, call.x)
        if local.rank == root_index:
            across.broadcast(data, root=root_node)
        local.broadcast(data, root=root_index)
    return prepared.give()
