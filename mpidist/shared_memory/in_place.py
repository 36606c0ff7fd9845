"""The ``symmetric`` executor: every rank reads and writes the others' arrays in symmetric memory.

A kernel is a program that begins when all ranks have arrived at the call on the arrival board, and
has a barrier between its phases; an empty last phase means that other ranks may still access this
rank's memory until the barrier before it.  Reductions take one pass or are cut into pieces that
stay in cache, so the data cross the memory bus once to be read and once to be written, whatever the
number of ranks.  Each kernel combines in the order of the ``direct`` schedule of its collective, so
the result has the same bits (see :mod:`.fold`).

The functions that make a program of a kernel are also used by the executors in :mod:`.slots` and
:mod:`.single_copy`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..algorithms.relabel import onward
from ..backends.program import Action, Program, Round, Side, store
from ..calls.call import Call
from ..schedule.rounds import blocks
from . import rooted
from .barrier import Barrier
from .compiled import streams
from .fold import fold
from .heap import Heap, Location
from .kernel import Body, Phase, copier, divisor, push, slices_of, unowned

NEEDS = {
    "allreduce": "out",
    "allgather": "out",
    "scatter": "out",
    "broadcast": "out",
    "reduce": "x",
    "reduce_scatter": "x",
    "gather": "x",
    "alltoall": "x",
}
"""The array of each collective that must be symmetric, on every rank."""
BY_PARTS = ("gather", "scatter")
"""Collectives whose symmetric array is each rank's part, at any offset of one allocation."""


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


def memory_key(call: Call, location: Location, heap: Heap) -> str:
    """Return the text that identifies the symmetric memory of a call; equal on all ranks.

    `location` is that of :func:`location_of`.  For gather and scatter the text names only the
    allocation.  For an allreduce it includes the input, if that is another symmetric array: the
    other ranks read it there.  A private input is copied into the result first.
    """
    if call.collective in BY_PARTS:
        return f"@{location.allocation.number}"
    own = call.collective == "allreduce" and not call.in_place and call.count > 0
    source = heap.find(call.x) if own else None
    return location.key if source is None else f"{location.key} from {source.key}"


NO_HEAP = "the ranks share no memory"


def kernel(call: Call, location: Location, heap: Heap) -> Program:
    """Return the program that performs a call in symmetric memory: its kernel, bound.

    `location` is that of :func:`location_of`.
    """
    tags = [0]
    return assemble(_KERNELS[call.collective](call, location, heap, tags), heap, tags)


def assemble(body: Body, heap: Heap, tags: list[int], slot: int | None = None) -> Program:
    """Return the program of a kernel, with a barrier between its phases.

    Parameters
    ----------
    body : Body
        Actions before this rank announces its arrival, and the phases after all have arrived.
    heap : Heap
        The heap whose barrier counters are used.
    tags : list of int
        ``Program.tags``: one number, the set of barrier counters and notes in ``heap.lines`` that
        a run uses; 0 in blocking calls.  The kernel's actions read it at each run.
    slot : int, optional
        Index of the staging slot that the kernel uses.
    """
    before, phases = body
    first, *later = (phase if isinstance(phase, Phase) else Phase(phase) for phase in phases)
    items: list[Round | Side] = [Round((), None, tuple(first.actions))]
    for actions, awaits in later:
        items.append(Round((), Barrier(heap.lines, tags, awaits), tuple(actions)))
    return Program(items, tags=tags, before=tuple(before), slot=slot, meets=True)


def _own_first(views: Sequence[np.ndarray], rank: int) -> list[np.ndarray]:
    return [views[rank], *(views[peer] for peer in onward(rank, len(views)))]


def _allreduce(call: Call, location: Location, heap: Heap, tags: list[int]) -> Body:
    assert call.x is not None and call.op is not None
    outs = location.views(call.x.size, call.dtype)
    source = heap.find(call.x)
    before: list[Action] = []
    if source is not None:
        inputs = source.views(call.x.size, call.dtype)
    else:
        inputs = outs
        before.append(store(outs[call.rank], unowned(call.x)))
    mine = blocks(call.x.size, call.size)[call.rank]
    targets = [out[mine] for out in _own_first(outs, call.rank)]
    # In place, the targets have just been read and are in the cache: streaming would not pay.
    streamed = source not in (None, location) and streams(call.nbytes)
    inputs = [x[mine] for x in inputs]
    combine = fold(call.op, inputs, call.rank, targets, divisor(call), streamed=streamed)
    return before, [combine, []]


def _reduce_scatter(call: Call, location: Location, heap: Heap, tags: list[int]) -> Body:
    assert call.x is not None and call.op is not None and call.out is not None
    mine = slices_of(call.counts)[call.rank]
    inputs = [x[mine] for x in location.views(call.x.size, call.dtype)]
    out, streamed = [unowned(call.out)], streams(call.out.nbytes)
    return [], [fold(call.op, inputs, call.rank, out, divisor(call), streamed=streamed), []]


def _allgather(call: Call, location: Location, heap: Heap, tags: list[int]) -> Body:
    assert call.x is not None and call.out is not None
    mine = slices_of(call.counts)[call.rank]
    outs = location.views(call.out.size, call.dtype)
    targets = [out[mine] for out in _own_first(outs, call.rank)]
    targets = targets[1:] if call.in_place else targets
    return [], [push(unowned(call.x), targets, copier(call.out)), []]


def _alltoall(call: Call, location: Location, heap: Heap, tags: list[int]) -> Body:
    assert call.x is not None and call.out is not None
    mine = slices_of(call.counts)[call.rank]
    views = location.views(call.x.size, call.dtype)
    out, parts = unowned(call.out), slices_of(call.out_counts)
    order, copy = [call.rank, *onward(call.rank, call.size)], copier(out)
    return [], [[copy(out[parts[s]], views[s][mine]) for s in order], []]


_KERNELS = {
    "allreduce": _allreduce,
    "reduce_scatter": _reduce_scatter,
    "reduce": rooted.reduce,
    "allgather": _allgather,
    "broadcast": rooted.broadcast,
    "gather": rooted.gather,
    "scatter": rooted.scatter,
    "alltoall": _alltoall,
}
