"""Collectives in symmetric memory: every rank reads and writes the arrays of the others in place.

A kernel is a program of two or three rounds whose transfer is a barrier.  Reductions are cut into
pieces that stay in cache, so the data cross the memory bus once to be read and once to be written,
whatever the number of ranks.  Each is an executor of the ``direct`` schedule of its collective: the
rank that owns a slice combines its own contribution first, then those below from near to far, then
those above, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from .algorithms.relabel import onward, outward
from .arrays import address
from .binding import Program, Round
from .call import Call
from .operations import Op, finish_mean
from .schedule.rounds import blocks
from .storage import Action, view_at
from .symmetric import Heap, Place

PIECE_BYTES = 64 << 10
Body = tuple[list[Action], list[list[Action]]]  # before the first barrier; after each but the last

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
"""Which array of a call must be symmetric, on every rank."""


def place_of(call: Call, heap: Heap | None) -> Place | None:
    """Give the place of the array that the kernel of this collective needs, or None."""
    need = NEEDS.get(call.collective)
    if heap is None or need is None:
        return None
    return heap.find(call.out if need == "out" else call.x)


def program(call: Call, place: Place, heap: Heap) -> Program:
    """Bind the kernel of a call to its memory."""
    assert heap.barrier is not None
    before, phases = _KERNELS[call.collective](call, place, heap)
    rounds = []
    for index, actions in enumerate([*phases, []]):
        rounds.append(Round(tuple(before) if index == 0 else (), heap.barrier, tuple(actions)))
    return Program(list(rounds), (), 0, 0, [0])


def _fold(
    op: Op, inputs: Sequence[np.ndarray], rank: int, targets: Sequence[np.ndarray], mean: int
) -> list[Action]:
    """Combine a slice of all inputs, piece by piece, and store it in all targets."""
    count, itemsize = inputs[rank].size, inputs[rank].itemsize
    piece = max(1, PIECE_BYTES // max(itemsize, 1))
    scratch = np.empty(min(piece, count), inputs[rank].dtype)
    combine: Callable[..., Any] = op.function if op.builtin else op.combine
    order = outward(rank, len(inputs))
    actions: list[Action] = []
    for start in range(0, count, piece):
        part = slice(start, min(start + piece, count))
        first, rest = targets[0][part], targets[1:]
        value, left = inputs[rank][part], len(order)
        for peer in order:
            left -= 1
            target = first if left == 0 else scratch[: value.size]
            theirs = inputs[peer][part]
            operands = (theirs, value) if peer < rank else (value, theirs)
            actions.append(partial(combine, *operands, out=target))
            value = target
        if not order and value is not first:
            actions.append(partial(np.copyto, first, value))
        if mean:
            actions.append(partial(finish_mean, first, mean))
        actions.extend(partial(np.copyto, other[part], first) for other in rest)
    return actions


def _mean(call: Call) -> int:
    return call.size if call.op is not None and call.op.name == "mean" else 0


def _slices(counts: Sequence[int]) -> list[slice]:
    stops = list(accumulate(counts))
    return [slice(stop - count, stop) for stop, count in zip(stops, counts)]


def _own_first(views: Sequence[np.ndarray], rank: int) -> list[np.ndarray]:
    return [views[rank], *(views[peer] for peer in onward(rank, len(views)))]


def _allreduce(call: Call, place: Place, heap: Heap) -> Body:
    assert call.x is not None and call.op is not None
    outs = place.views(call.x.size, call.dtype)
    source = heap.find(call.x)
    before: list[Action] = []
    if source is not None:
        inputs = source.views(call.x.size, call.dtype)
    else:
        inputs = outs
        before.append(partial(np.copyto, outs[call.rank], _unowned(call.x)))
    mine = blocks(call.x.size, call.size)[call.rank]
    targets = [out[mine] for out in _own_first(outs, call.rank)]
    fold = _fold(call.op, [x[mine] for x in inputs], call.rank, targets, _mean(call))
    return before, [fold]


def _reduce_scatter(call: Call, place: Place, heap: Heap) -> Body:
    assert call.x is not None and call.op is not None and call.out is not None
    mine = _slices(call.counts)[call.rank]
    inputs = [x[mine] for x in place.views(call.x.size, call.dtype)]
    return [], [_fold(call.op, inputs, call.rank, [_unowned(call.out)], _mean(call))]


def _reduce(call: Call, place: Place, heap: Heap) -> Body:
    assert call.x is not None and call.op is not None
    shadow = place.shadow(call.root, call.x.size, call.dtype)
    mine = blocks(call.x.size, call.size)[call.rank]
    inputs = [x[mine] for x in place.views(call.x.size, call.dtype)]
    fold = _fold(call.op, inputs, call.rank, [shadow[mine]], _mean(call))
    if call.rank != call.root or call.out is None:
        return [], [fold, []]
    return [], [fold, [partial(np.copyto, _unowned(call.out), shadow)]]


def _allgather(call: Call, place: Place, heap: Heap) -> Body:
    assert call.x is not None and call.out is not None
    mine = _slices(call.counts)[call.rank]
    outs = place.views(call.out.size, call.dtype)
    x = _unowned(call.x)
    targets = [out[mine] for out in _own_first(outs, call.rank)]
    if call.in_place:
        targets = targets[1:]
    return [], [[partial(np.copyto, target, x) for target in targets]]


def _broadcast(call: Call, place: Place, heap: Heap) -> Body:
    assert call.out is not None
    views = place.views(call.out.size, call.dtype)
    if call.rank != call.root:
        return [], [[partial(np.copyto, views[call.rank], views[call.root])]]
    if call.in_place or call.x is None:
        return [], [[]]
    return [partial(np.copyto, views[call.rank], _unowned(call.x))], [[]]


def _gather(call: Call, place: Place, heap: Heap) -> Body:
    if call.rank != call.root or call.out is None:
        return [], [[]]
    out = _unowned(call.out)
    actions: list[Action] = []
    for source, part in enumerate(_slices(call.counts)):
        if source == call.rank and call.in_place:
            continue
        count = part.stop - part.start
        x = place.views(count, call.dtype)[source]
        actions.append(partial(np.copyto, out[part], x))
    return [], [actions]


def _scatter(call: Call, place: Place, heap: Heap) -> Body:
    if call.rank != call.root or call.x is None:
        return [], [[]]
    x = _unowned(call.x)
    actions: list[Action] = []
    for target, part in enumerate(_slices(call.counts)):
        if target == call.rank and call.in_place:
            continue
        out = place.views(part.stop - part.start, call.dtype)[target]
        actions.append(partial(np.copyto, out, x[part]))
    return [], [actions]


def _alltoall(call: Call, place: Place, heap: Heap) -> Body:
    assert call.x is not None and call.out is not None
    mine = _slices(call.counts)[call.rank]
    views = place.views(call.x.size, call.dtype)
    out, parts = _unowned(call.out), _slices(call.out_counts)
    order = [call.rank, *onward(call.rank, call.size)]
    return [], [[partial(np.copyto, out[parts[s]], views[s][mine]) for s in order]]


def _unowned(x: np.ndarray) -> np.ndarray:
    """Give a view that does not keep the user's array alive."""
    return view_at(address(x), x.size, x.dtype)


_KERNELS = {
    "allreduce": _allreduce,
    "reduce_scatter": _reduce_scatter,
    "reduce": _reduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
}
