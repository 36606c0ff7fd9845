"""Collectives in symmetric memory: every rank reads and writes the arrays of the others in place.

A kernel is a program that begins when all ranks have come to the call, as the arrival board tells,
and that has a barrier between its phases; the last is empty where others may still be at work in
this rank's memory.  Reductions take one pass or are cut into pieces that stay in cache, so the data
cross the memory bus once to be read and once to be written, whatever the number of ranks.  Each is
an executor of the ``direct`` schedule of its collective, and so gives the same bits (see
:mod:`.fold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..algorithms.relabel import onward
from ..backends.base import Backend
from ..backends.executor import Executor
from ..backends.program import Action, Program, Round, Side, store
from ..calls.call import Call
from ..schedule.registry import Choice
from ..schedule.rounds import blocks
from . import rooted
from .barrier import Arrival, Barrier
from .compiled import streams
from .fold import fold
from .heap import Heap, Place
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
"""Which array of a call must be symmetric, on every rank."""
BY_PARTS = ("gather", "scatter")
"""Whose symmetric array is a rank's own part, anywhere in an allocation that all ranks hold."""


def place_of(call: Call, heap: Heap) -> Place | None:
    """Return the place of the array that the kernel of this collective needs, or None.

    Numpy gives an empty array no address of its own, so a rank whose part has no elements cannot
    tell where the others' parts lie.
    """
    need = NEEDS.get(call.collective)
    if need is None or call.on_device:
        return None
    if call.collective in BY_PARTS and not call.even and 0 in call.counts:
        return None
    return heap.find(call.out if need == "out" else call.x)


def where(call: Call, place: Place, heap: Heap) -> str:
    """Name the memory that a call takes place in: it must be the same on every rank.

    In allreduce that is also the input, if it is a symmetric array of its own: the others read it
    there.  A private one is copied into the result first, where it lies in place as well.
    """
    if call.collective in BY_PARTS:
        return f"@{place.allocation.number}"
    own = call.collective == "allreduce" and not call.in_place and call.count > 0
    source = heap.find(call.x) if own else None
    return place.key if source is None else f"{place.key} from {source.key}"


class Checks(Protocol):
    """Compares the calls of the ranks."""

    def check_same(self, sequence: int, what: str, fingerprint: int) -> None:
        """Raise CollectiveMismatch if a rank of this node is seen to mean another operation."""


class SharedMemory(Protocol):
    """What executors in shared memory are made from: the service of a communicator."""

    backend: Backend

    @property
    def reports(self) -> Checks:
        """Compares the calls of the ranks."""

    heap: Heap | None


NO_HEAP = "the ranks share no memory"


class Symmetric(Executor):
    """Collectives in place, in arrays of ``comm.empty``; and the barrier."""

    name, summary = "symmetric", "every rank reads and writes the others' memory in place"

    def __init__(self, host: SharedMemory):
        self._heap, self._board = host.heap, host.backend.board
        self._check_same = host.reports.check_same

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return mostly that an array is private memory."""
        heap = self._heap
        if heap is None:
            return NO_HEAP
        if call.collective == "barrier":
            return None
        if place_of(call, heap) is None:
            return f"{NEEDS.get(call.collective, 'x')} is no array of comm.empty()"
        return "rows of other ranks are not known" if call.uneven_alltoall else None

    def depends_on(self, call: Call) -> bool:
        """Return whether the array that must be symmetric is."""
        return self._heap is not None and place_of(call, self._heap) is not None

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the place in symmetric memory."""
        heap = self._heap
        assert heap is not None
        place = place_of(call, heap)
        return "in symmetric memory" + ("" if place is None else f" {where(call, place, heap)}")

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Bind the kernel; in the background its first round waits for the other ranks."""
        heap = self._heap
        assert heap is not None
        if call.collective == "barrier":
            program = Program([], meets=True)
        else:
            place = place_of(call, heap)
            assert place is not None
            program = kernel(call, place, heap)
        if background:
            arrival = Arrival(self._board, self._check_same)
            program.items = [Round((), arrival, ()), *program.items]
            program.named, program.meets = arrival, False
        return program


def kernel(call: Call, place: Place, heap: Heap) -> Program:
    """Bind the kernel of a call to its memory."""
    base = [0]
    return assemble(_KERNELS[call.collective](call, place, heap, base), heap, base)


def assemble(body: Body, heap: Heap, base: list[int], slot: int | None = None) -> Program:
    """Return the program of a kernel, with a barrier between its phases."""
    before, phases = body
    first, *later = (phase if isinstance(phase, Phase) else Phase(phase) for phase in phases)
    items: list[Round | Side] = [Round((), None, tuple(first.actions))]
    for actions, awaits in later:
        items.append(Round((), Barrier(heap.lines, base, awaits), tuple(actions)))
    return Program(items, tags=base, before=tuple(before), slot=slot, meets=True)


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
        before.append(store(outs[call.rank], unowned(call.x)))
    mine = blocks(call.x.size, call.size)[call.rank]
    targets = [out[mine] for out in _own_first(outs, call.rank)]
    # In place, what is stored to has just been read: it is in the cache.
    streamed = source not in (None, place) and streams(call.nbytes)
    inputs = [x[mine] for x in inputs]
    combine = fold(call.op, inputs, call.rank, targets, divisor(call), streamed=streamed)
    return before, [combine, []]


def _reduce_scatter(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    assert call.x is not None and call.op is not None and call.out is not None
    mine = slices_of(call.counts)[call.rank]
    inputs = [x[mine] for x in place.views(call.x.size, call.dtype)]
    out, streamed = [unowned(call.out)], streams(call.out.nbytes)
    return [], [fold(call.op, inputs, call.rank, out, divisor(call), streamed=streamed), []]


def _allgather(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    assert call.x is not None and call.out is not None
    mine = slices_of(call.counts)[call.rank]
    outs = place.views(call.out.size, call.dtype)
    targets = [out[mine] for out in _own_first(outs, call.rank)]
    targets = targets[1:] if call.in_place else targets
    return [], [push(unowned(call.x), targets, copier(call.out)), []]


def _alltoall(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    assert call.x is not None and call.out is not None
    mine = slices_of(call.counts)[call.rank]
    views = place.views(call.x.size, call.dtype)
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
