"""Collectives in symmetric memory: every rank reads and writes the arrays of the others in place.

A kernel is a program of two or three rounds whose transfer is a barrier.  Reductions are cut into
pieces that stay in cache, so the data cross the memory bus once to be read and once to be written,
whatever the number of ranks.  Each is an executor of the ``direct`` schedule of its collective, and
so gives the same bits (see :mod:`.fold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from ..algorithms.relabel import onward
from ..arrays import address
from ..binding import Program, Round
from ..call import Call
from ..schedule.rounds import blocks
from ..storage import Action, view_at
from .barrier import Barrier
from .fold import PIECE_BYTES, fold
from .heap import Heap, Place

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
_BY_PARTS = ("gather", "scatter")  # whose symmetric array is a rank's own part


def place_of(call: Call, heap: Heap | None) -> Place | None:
    """Give the place of the array that the kernel of this collective needs, or None.

    Numpy gives an empty array no address of its own, so a rank whose part has no elements cannot
    tell where the others' parts lie.
    """
    need = NEEDS.get(call.collective)
    if heap is None or need is None:
        return None
    if call.collective in _BY_PARTS and not call.even and 0 in call.counts:
        return None
    return heap.find(call.out if need == "out" else call.x)


def program(call: Call, place: Place, heap: Heap) -> Program:
    """Bind the kernel of a call to its memory."""
    base = [0]
    before, phases = _KERNELS[call.collective](call, place, heap, base)
    return rounds(before, phases, heap, base)


def rounds(
    before: list[Action], phases: list[list[Action]], heap: Heap, base: list[int]
) -> Program:
    """Put a barrier before each phase, and one behind the last."""
    items = []
    for index, actions in enumerate([*phases, []]):
        first = tuple(before) if index == 0 else ()
        items.append(Round(first, Barrier(heap.lines, base), tuple(actions)))
    return Program(list(items), (), 0, 0, base)


def _mean(call: Call) -> int:
    return call.size if call.op is not None and call.op.name == "mean" else 0


def _slices(counts: Sequence[int]) -> list[slice]:
    stops = list(accumulate(counts))
    return [slice(stop - count, stop) for stop, count in zip(stops, counts)]


def _own_first(views: Sequence[np.ndarray], rank: int) -> list[np.ndarray]:
    return [views[rank], *(views[peer] for peer in onward(rank, len(views)))]


def _allreduce(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
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
    return before, [fold(call.op, [x[mine] for x in inputs], call.rank, targets, _mean(call))]


def _reduce_scatter(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    assert call.x is not None and call.op is not None and call.out is not None
    mine = _slices(call.counts)[call.rank]
    inputs = [x[mine] for x in place.views(call.x.size, call.dtype)]
    return [], [fold(call.op, inputs, call.rank, [_unowned(call.out)], _mean(call))]


def _reduce(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    """Every rank combines a slice straight into the root's `out`.

    Only the root knows it, and so notes before the first barrier where it lies.  Where it is
    private, or a rank has given back its mapping of it, the slice goes by the shadow of `x`.
    """
    assert call.x is not None and call.op is not None
    slices, op, mean = blocks(call.x.size, call.size), call.op, _mean(call)
    mine = slices[call.rank]
    inputs = [x[mine] for x in place.views(call.x.size, call.dtype)]
    shadow = place.shadow(call.root, call.x.size, call.dtype)
    if call.rank == call.root:
        assert call.out is not None
        out = _unowned(call.out)
        aim = heap.find(call.out)
        number, offset = (0, 0) if aim is None else (aim.allocation.number, aim.offset)
        announce: list[Action] = [
            partial(heap.lines.note, base, _ALLOCATION, number),
            partial(heap.lines.note, base, _OFFSET, offset),
        ]
        collect = partial(_collect, heap, base, out, shadow, slices, call.rank)
        return announce, [fold(op, inputs, call.rank, [out[mine]], mean), [collect]]
    known: dict[tuple[int, int], list[Action]] = {}

    def combine() -> None:
        number, offset = (heap.lines.read(base, call.root, i) for i in (_ALLOCATION, _OFFSET))
        target = heap.place(number, offset) if number else None
        heap.lines.note(base, _BY_SHADOW, target is None)
        if (number, offset) not in known or number and target is None:
            view = shadow if target is None else target.views(shadow.size, call.dtype)[call.root]
            known.clear()
            known[number, offset] = fold(op, inputs, call.rank, [view[mine]], mean)
        for action in known[number, offset]:
            action()

    return [], [[combine], []]


_ALLOCATION, _OFFSET, _BY_SHADOW = range(3)  # notes of reduce


def _collect(
    heap: Heap,
    base: list[int],
    out: np.ndarray,
    shadow: np.ndarray,
    slices: Sequence[slice],
    rank: int,
) -> None:
    """Bring to the root's `out` what came by the shadow."""
    for peer, part in enumerate(slices):
        if peer != rank and heap.lines.read(base, peer, _BY_SHADOW):
            np.copyto(out[part], shadow[part])


def _allgather(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    assert call.x is not None and call.out is not None
    mine = _slices(call.counts)[call.rank]
    outs = place.views(call.out.size, call.dtype)
    targets = [out[mine] for out in _own_first(outs, call.rank)]
    return [], [_push(_unowned(call.x), targets[1:] if call.in_place else targets)]


def _push(x: np.ndarray, targets: Sequence[np.ndarray]) -> list[Action]:
    """Store an array in several places, piece by piece: read from memory once."""
    if len(targets) < 2:
        return [partial(np.copyto, target, x) for target in targets]
    piece = max(1, PIECE_BYTES // max(x.itemsize, 1))
    return [
        partial(np.copyto, target[start : start + piece], x[start : start + piece])
        for start in range(0, x.size, piece)
        for target in targets
    ]


def _broadcast(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    assert call.out is not None
    views = place.views(call.out.size, call.dtype)
    if call.rank != call.root:
        return [], [[partial(np.copyto, views[call.rank], views[call.root])]]
    if call.in_place or call.x is None:
        return [], [[]]
    return [partial(np.copyto, views[call.rank], _unowned(call.x))], [[]]


def _gather(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
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


def _scatter(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
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


def _alltoall(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
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
