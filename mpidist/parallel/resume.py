"""How gradients were sent, in a checkpoint: a run that resumes it has the same bits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgument
from .pieces import Divided

log = logging.getLogger("mpidist")


def sending_of(model: Any) -> dict[str, Any]:
    """Give the buckets of a :class:`~mpidist.parallel.DDP`, and how all that it sends is added."""
    grouping = model.reducer.grouping
    return {
        "ranks": model.comm.size,
        "observed": model.reducer.observed,
        "buckets": grouping.names(),
        "algorithms": [bucket.algorithm for bucket in grouping.buckets],
        "buffers": model.buffer_sync.algorithms,
    }


def send_so(model: Any, sending: Mapping[str, Any]) -> None:
    """Send like the run that gave :func:`sending_of`; collective.

    On another number of ranks algorithms are chosen anew.
    """
    reducer = model.reducer
    layout = reducer.grouping.layout_of(sending["buckets"])
    if layout is None:
        return
    same = sending["ranks"] == model.comm.size
    algorithms = sending["algorithms"] if same else None
    reducer.regroup(layout, algorithms, sending.get("observed", True))
    if same:
        model.buffer_sync.algorithms = sending.get("buffers", {})


def kept_by_hook(model: Any) -> dict[int, Any]:
    """Give what the hook keeps on this rank, by the rank; nothing if it keeps nothing."""
    save = getattr(model.reducer.hook, "save", None)
    return {} if save is None else Divided({model.comm.rank: save(model.buckets)})


def give_to_hook(model: Any, kept: Mapping[int, Any], ranks: int) -> None:
    """Give the hook what ranks kept; of one that was alone with its state, its own.

    Raises
    ------
    InvalidArgument
        If it is not for these buckets.
    """
    restore, comm = getattr(model.reducer.hook, "restore", None), model.comm
    if restore is None or not kept:
        if kept and comm.rank == 0:
            log.warning("what a communication hook kept is not used: there is no such hook now")
        return
    wrong = [rank for rank, states in kept.items() if len(states) != len(model.buckets)]
    if wrong:
        raise InvalidArgument(
            f"rank {comm.rank}: the state of rank {wrong[0]}'s hook is for {len(kept[wrong[0]])} "
            f"buckets, there are {len(model.buckets)}"
        )
    if len(kept) == ranks:
        restore(model.buckets, [kept[rank] for rank in range(ranks)], comm.rank, comm.size)
    elif ranks == comm.size and comm.rank in kept:
        restore(model.buckets, [kept[comm.rank]], 0, 1)
    else:
        log.warning("rank %d: the state has nothing of what this rank's hook kept", comm.rank)
