"""Which array of a call must be symmetric, and how the ranks compare where it is."""

from __future__ import annotations

from ..calls.call import Call
from .heap import Heap, Location

NEEDS = {
    "allreduce": "out",
    "allgather": "out",
    "scatter": "out",
    "broadcast": "out",
    "reduce": "x",
    "reduce_scatter": "x",
    "gather": "x",
    "alltoall": "x",
    "scan": "out",
    "exscan": "x",
}
"""The array of each collective that must be symmetric, on every rank."""
BY_PARTS = ("gather", "scatter")
"""Collectives whose symmetric array is each rank's part, at any offset of one allocation."""

OR_IN_PLACE = ("allreduce", "scan")
"""Collectives whose input may be in the result, on some ranks only: see :func:`source_of`."""


def location_of(call: Call, heap: Heap) -> Location | None:
    """Return the location of the array that must be symmetric (see `NEEDS`); None if it is private.

    For gather and scatter it is None on every rank if any rank's part is empty: numpy gives an
    empty array no address of its own, so that rank could not find the allocation of the others'
    parts.
    """
    need = NEEDS.get(call.collective)
    if need is None or call.on_device:
        return None
    if call.collective in BY_PARTS and not call.even and 0 in call.counts:
        return None
    return heap.find(call.out if need == "out" else call.x)


def source_of(call: Call, heap: Heap) -> Location | None:
    """Return where other ranks read the input of an allreduce or a scan; None if in the result.

    There it is if the input is another symmetric array, on every rank: a private input is copied
    into the result first.
    """
    if call.collective not in OR_IN_PLACE or call.in_place or not call.count:
        return None
    return heap.find(call.x)


def memory_key(call: Call, location: Location, heap: Heap) -> str:
    """Return the text that identifies the symmetric memory of a call; equal on all ranks.

    `location` is that of :func:`location_of`.  For gather and scatter the text names only the
    allocation.  Where it has that of :func:`source_of`, others have no use for the result of a
    scan.
    """
    if call.collective in BY_PARTS:
        return f"@{location.allocation.number}"
    source = source_of(call, heap)
    if source is None:
        return location.key
    own = "" if call.collective == "scan" else f"{location.key} "
    return f"{own}from {source.key}"
