"""Gradients that another rank computes again: they find a processor that computes wrongly."""

from __future__ import annotations

import copy
import math
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from ..arguments import function
from ..communicator.agreement import on_all_ranks
from ..communicator.communicator import Communicator
from ..errors import InvalidArgument, ReplicasDiffer
from ..frameworks.base import Framework, digest

Compute = Callable[[Any, Any], object]
Digests = dict[str, tuple[int, ...] | None]

_NAMED = 3  # most gradients of a pair of ranks that a message names


def recheck(
    comm: Communicator, framework: Framework, module: Any, compute: Compute, batch: Any
) -> None:
    """Compare each rank's gradients with those that the rank before it computes; collective.

    See :meth:`mpidist.DDP.recheck`.
    """
    rank, size = comm.rank, comm.size
    function("compute", compute, "a copy of the module and a batch", f"rank {rank}: ")

    #     rank     0      1      2
    #     own      0      1      2    batch
    #     again    1      2      0
    before, after = (rank - 1) % size, (rank + 1) % size
    # Its own, too: an array that was pickled may have other strides, and then sums in other order.
    batches = comm.alltoall_object([batch if k in (before, rank) else None for k in range(size)])
    act = partial(_digests, framework, module, compute, rank)
    own, again = (
        on_all_ranks(comm, partial(act, batches[k]), "recheck(): compute") for k in (rank, after)
    )
    wrong = {}  # the unlike gradients, by the rank that computed them again
    for one, found in enumerate(again):
        names = [name for name, value in found.items() if value != own[(one + 1) % size][name]]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            wrong[one] = ", ".join(names[:_NAMED]) + more
    if not wrong:
        return
    hosts = comm.allgather_object(socket.gethostname())
    pairs = [{one, (one + 1) % size} for one in wrong]
    suspects = set.intersection(*pairs) if size > 2 else set()
    why = "one of both computes wrongly, or compute not always alike"
    if len(suspects) == 1:
        why = f"rank {min(suspects)} is in both pairs: it computes wrongly"
    elif len(pairs) > 1:
        why = "compute does not always compute alike, or several ranks compute wrongly"
    texts = [
        f"{names} of the batch of rank {(one + 1) % size}, there and on rank {one}"
        for one, names in wrong.items()
    ]
    told = ", ".join(f"rank {k} runs on {hosts[k]}" for k in sorted(suspects or set.union(*pairs)))
    raise ReplicasDiffer(
        f"rank {rank}: recheck(): unlike gradients: {'; '.join(texts)}; {why}; {told}"
    )


def _digests(framework: Framework, module: Any, compute: Compute, rank: int, batch: Any) -> Digests:
    """Return the digests of the gradients of a batch, by parameter; None where there is none."""
    # A copy has neither hooks of a DDP nor gradients, and what compute does to it ends with it.
    replica = copy.deepcopy(module)
    named = framework.parameters(replica)
    for _, p in named:
        p.grad = None
    compute(replica, batch)
    found: Digests = {}
    for name, p in named:
        found[name] = None
        if p.grad is not None:
            flat = framework.zeros(p, math.prod(p.data.shape))
            framework.copy(framework.view(flat, 0, p), p.grad)  # dense, whatever it is
            found[name] = digest(flat)
    if not any(found.values()):
        raise InvalidArgument(
            f"rank {rank}: compute={compute!r} has left no gradients in the module that it was "
            "given: expected forward and backward of that copy"
        )
    return found
