"""Collectives of private arrays through slots of shared memory.

A rank copies what others need into its slot and is announced; the others then read it.  Two slots
take turns, so that nobody waits until the others have read: a slot is used again when every rank
has come to a later call.  Each kernel is an executor of the ``direct`` schedule of its collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..algorithms.relabel import onward
from ..call import Call
from ..schedule.rounds import blocks
from ..storage import Action, store
from .heap import STAGING_BYTES, Heap, Place
from .kernels import Kernel, assemble
from .parts import Body, combine, combine_all, cut, one_shot, slices_of, unowned


def kernel(call: Call, heap: Heap, slot: int) -> Kernel:
    """Bind the kernel of a call to its arrays and to slot 0 or 1."""
    return assemble(_KERNELS[call.collective](call, heap.slot(slot)), heap, [0], slot)


def why_not(call: Call) -> str | None:
    """Give why a call cannot go through the slots, or None."""
    if call.collective not in _KERNELS:
        return f"{call.collective} has no such form"
    if call.uneven_alltoall:
        return "rows of other ranks are not known"
    if call.nbytes > STAGING_BYTES:
        return f"it has more than the {STAGING_BYTES >> 20} MiB of a slot"
    return None


def _allreduce(call: Call, slot: Place) -> Body:
    """Up to 128 KiB from all others (of float16 8) everyone combines everything; else a slice.

    Either way a slice is combined in its owner's order, so the bits are the same everywhere.
    """
    assert call.x is not None and call.out is not None
    if not one_shot(call):
        return _two_shot(call, slot, unowned(call.out), onward(call.rank, call.size))
    before, inputs = _bring(call, slot, [slice(0, call.x.size)])
    return before, [combine_all(call, inputs, unowned(call.out))]


def _reduce(call: Call, slot: Place) -> Body:
    """Up to 64 KiB (float16: 4) the root combines everything; else it fetches what each did."""
    assert call.x is not None
    here = call.rank == call.root
    if not one_shot(call):
        others = onward(call.rank, call.size) if here else []
        return _two_shot(
            call, slot, unowned(call.out) if here and call.out is not None else None, others
        )
    if not here:
        return _bring(call, slot, [slice(0, call.x.size)])[0], [[]]
    assert call.out is not None
    inputs = _bring(call, slot, [])[1]
    return [], [combine_all(call, inputs, unowned(call.out))]


def _bring(call: Call, slot: Place, parts: list[slice]) -> tuple[list[Action], list[np.ndarray]]:
    """Copy parts of this rank's input into its slot; give that, and the inputs by rank."""
    assert call.x is not None
    x, slots = unowned(call.x), slot.views(call.x.size, call.dtype)
    copies: list[Action] = [store(slots[call.rank][part], x[part]) for part in parts]
    return copies, [x if peer == call.rank else view for peer, view in enumerate(slots)]


def _two_shot(call: Call, slot: Place, out: np.ndarray | None, others: Sequence[int]) -> Body:
    """Combine a slice each, and store it for the others; fetch the slices of `others`."""
    assert call.x is not None
    parts, mine = blocks(call.x.size, call.size), blocks(call.x.size, call.size)[call.rank]
    needed = [parts[peer] for peer in onward(call.rank, call.size)]
    before, inputs = _bring(call, slot, needed)
    results = [slot.shadow(rank, call.x.size, call.dtype) for rank in range(call.size)]
    target = results[call.rank][mine] if out is None else out[mine]
    work = combine(call, inputs, call.rank, mine, target)
    if out is not None and call.collective == "allreduce":
        work.append(store(results[call.rank][mine], target))
    fetch: list[Action] = []
    if out is not None:
        fetch = [store(out[parts[r]], results[r][parts[r]]) for r in others]
    return before, [work, fetch]


def _reduce_scatter(call: Call, slot: Place) -> Body:
    assert call.out is not None
    parts = slices_of(call.counts)
    needed = [parts[peer] for peer in onward(call.rank, call.size)]
    before, inputs = _bring(call, slot, needed)
    return before, [combine(call, inputs, call.rank, parts[call.rank], unowned(call.out))]


def _allgather(call: Call, slot: Place) -> Body:
    assert call.x is not None and call.out is not None
    x = unowned(call.x)
    before: list[Action] = [store(slot.views(x.size, call.dtype)[call.rank], x)]
    return before, [_join(call, slot)]


def _broadcast(call: Call, slot: Place) -> Body:
    """The root stores a piece while the others fetch the one before.

    At most four pieces: with more ranks than cores every meeting costs 20 µs.
    """
    assert call.out is not None
    out = unowned(call.out)
    source = slot.views(out.size, call.dtype)[call.root]
    pieces = cut(out.size, out.itemsize, max(128 << 10, -(-out.nbytes // 4)))
    if call.rank != call.root:
        return [], [[store(out[part], source[part])] for part in pieces]
    x = out if call.x is None else unowned(call.x)
    first, *others = [[store(source[part], x[part])] for part in pieces]
    last: list[Action] = [] if call.in_place or call.x is None else [store(out, x)]
    return first, [*others, last]


def _gather(call: Call, slot: Place) -> Body:
    assert call.x is not None
    x = unowned(call.x)
    if call.rank != call.root:
        return [store(slot.views(x.size, call.dtype)[call.rank], x)], [[]]
    return [], [_join(call, slot)]


def _join(call: Call, slot: Place) -> list[Action]:
    """Put the parts of all ranks into `out`, the others' from their slots."""
    assert call.x is not None and call.out is not None
    out, parts = unowned(call.out), slices_of(call.counts)
    fetch: list[Action] = []
    if not call.in_place:
        fetch.append(store(out[parts[call.rank]], unowned(call.x)))
    for peer in onward(call.rank, call.size):
        theirs = slot.views(call.counts[peer], call.dtype)[peer]
        fetch.append(store(out[parts[peer]], theirs))
    return fetch


def _scatter(call: Call, slot: Place) -> Body:
    assert call.out is not None
    out, parts = unowned(call.out), slices_of(call.counts)
    source = slot.views(sum(call.counts), call.dtype)[call.root]
    if call.rank != call.root:
        return [], [[store(out, source[parts[call.rank]])]]
    assert call.x is not None
    x = unowned(call.x)
    before = [store(source[parts[r]], x[parts[r]]) for r in onward(call.rank, call.size)]
    own: list[Action] = []
    if not call.in_place:
        own.append(store(out, x[parts[call.rank]]))
    return list[Action](before), [own]


def _alltoall(call: Call, slot: Place) -> Body:
    assert call.x is not None and call.out is not None
    x, out, parts = unowned(call.x), unowned(call.out), slices_of(call.counts)
    slots, mine = slot.views(x.size, call.dtype), slices_of(call.counts)[call.rank]
    others = onward(call.rank, call.size)
    before = [store(slots[call.rank][parts[r]], x[parts[r]]) for r in others]
    fetch: list[Action] = [store(out[mine], x[mine])]
    fetch += [store(out[parts[r]], slots[r][mine]) for r in others]
    return list[Action](before), [fetch]


_KERNELS = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
}
