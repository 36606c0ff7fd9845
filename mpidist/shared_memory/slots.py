"""Collectives of private arrays through slots of shared memory.

A rank copies what others need into its slot and is announced; the others then read it.  Two slots
take turns, so that nobody waits until the others have read: a slot is used again when every rank
has come to a later call.  Each kernel is an executor of the ``direct`` schedule of its collective.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import cycle

import numpy as np

from ..algorithms.relabel import onward
from ..backends.executor import Executor
from ..backends.program import Action, Program, store
from ..calls.call import Call
from ..errors import Unsupported
from ..schedule.registry import Choice
from ..schedule.rounds import blocks
from ..selection.rules import STAGING_BYTES
from .heap import Heap, Place
from .in_place import NO_HEAP, SharedMemory, assemble
from .kernel import Body, combine, combine_all, cut, one_shot, slices_of, unowned

_PIECE_BYTES = 64 << 10  # 32 and 128 KiB took 1.05 to 1.1 times as long, from 512 KiB on, 2 ranks


_MOST_SHARED_BYTES = 1 << 20  # at 2 MiB binding and copying take as long as each other


class Staged(Executor):
    """Collectives of private arrays through the slots."""

    name, summary = "staged", "every rank reads what the others copied into shared memory"
    turns = 2

    def __init__(self, host: SharedMemory):
        self._heap = host.heap
        self._reason = NO_HEAP if host.heap is None else None
        self.ready = host.heap is None

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return mostly that the arrays are too long for a slot."""
        if self._reason is not None:
            return self._reason
        if background:
            return "this is in the background"
        return why_not(call)

    def make_ready(self) -> None:
        """Make the slots; collective."""
        assert self._heap is not None
        try:
            self._heap.make_staging()
        except (MemoryError, Unsupported) as error:
            self._reason = str(error)
        self.ready = True

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the executor's name: ranks that do without would wait for ever."""
        return self.name

    def kind(self, call: Call) -> Hashable:
        """Return what arrays of short calls must have in common to share those of the program."""
        if call.nbytes > _MOST_SHARED_BYTES or not (call.op is None or call.op.builtin):
            return None
        op = None if call.op is None else call.op.name
        brings = -1 if call.x is None else call.x.size
        gets = -1 if call.out is None else call.out.size
        return call.collective, call.dtype, call.root, op, call.counts, brings, gets

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Bind the kernel to slot number `turn`."""
        assert self._heap is not None
        return kernel(call, self._heap, turn)


def kernel(call: Call, heap: Heap, slot: int) -> Program:
    """Bind the kernel of a call to its arrays and to slot 0 or 1."""
    return assemble(_KERNELS[call.collective](call, heap.slot(slot)), heap, [0], slot)


def why_not(call: Call) -> str | None:
    """Return why a call cannot go through the slots, or None."""
    if call.collective not in _KERNELS:
        return f"{call.collective} has no such form"
    if call.uneven_alltoall:
        return "rows of other ranks are not known"
    if call.nbytes > STAGING_BYTES:
        return f"it has more than the {STAGING_BYTES >> 20} MiB of a slot"
    return None


def _allreduce(call: Call, slot: Place) -> Body:
    """Up to 128 KiB from all others (of half precision 1) everyone combines all; else a slice.

    Either way a slice is combined in its owner's order, so the bits are the same everywhere.
    """
    assert call.x is not None and call.out is not None
    if not one_shot(call):
        return _two_shot(call, slot, unowned(call.out), onward(call.rank, call.size))
    before, inputs = _bring(call, slot, [slice(0, call.x.size)])
    return before, [combine_all(call, inputs, unowned(call.out))]


def _reduce(call: Call, slot: Place) -> Body:
    """Up to 64 KiB (float16: 2) the root combines everything; else it fetches what each did."""
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


def _turns(count: int, itemsize: int, nbytes: int) -> list[tuple[int, slice]]:
    """Cut elements into pieces of so many bytes or more, which take turns in two places.

    The two so stay in the cache.  There are at most eight pieces: an array that is used once is
    bound for one call.
    """
    piece = max(nbytes // max(itemsize, 1), -(-count // 8), 1)
    return list(zip(cycle((0, 1)), cut(count, 1, piece)))


def _piped(bring: list[list[Action]], fetch: list[list[Action]]) -> Body:
    """Bring a piece while the one before is fetched."""
    later = [*bring[1:], []]
    return bring[0], [[*fetched, *brought] for fetched, brought in zip(fetch, later)]


def _allgather(call: Call, slot: Place) -> Body:
    return _join(call, slot, brings=True, fetches=True)


def _broadcast(call: Call, slot: Place) -> Body:
    """The root stores a piece while the others fetch the one before.

    1 MiB takes 0.75 of the time that it took by pieces that each had a place (2 ranks).
    """
    assert call.out is not None
    out = unowned(call.out)
    turns = _turns(out.size, out.itemsize, _PIECE_BYTES)
    longest = turns[0][1].stop
    places = slot.views(2 * longest, call.dtype)[call.root].reshape(2, longest)
    pieces = [(part, places[turn][: part.stop - part.start]) for turn, part in turns]
    if call.rank != call.root:
        return [], [[store(out[part], place)] for part, place in pieces]
    x = out if call.x is None else unowned(call.x)
    first, *others = [[store(place, x[part])] for part, place in pieces]
    last: list[Action] = [] if call.in_place or call.x is None else [store(out, x)]
    return first, [*others, last]


def _gather(call: Call, slot: Place) -> Body:
    here = call.rank == call.root
    return _join(call, slot, brings=not here, fetches=here)


def _join(call: Call, slot: Place, brings: bool, fetches: bool) -> Body:
    """Put the parts of all ranks into `out`, the others' from their slots, piece by piece."""
    assert call.x is not None
    x, counts, order = unowned(call.x), call.counts, onward(call.rank, call.size)
    turns = _turns(max(counts), x.itemsize, _PIECE_BYTES)
    longest = turns[0][1].stop
    places = [view.reshape(2, longest) for view in slot.views(2 * longest, call.dtype)]
    bring: list[list[Action]] = [[] for _ in turns]
    fetch: list[list[Action]] = [[] for _ in turns]
    for number, (turn, piece) in enumerate(turns):

        def of(rank: int, turn: int = turn, piece: slice = piece) -> tuple[slice, np.ndarray]:
            part = slice(min(piece.start, counts[rank]), min(piece.stop, counts[rank]))
            return part, places[rank][turn][: part.stop - part.start]

        mine, place = of(call.rank)
        if brings:
            bring[number] = [store(place, x[mine])]
        if fetches:
            assert call.out is not None
            out, parts = unowned(call.out), slices_of(counts)
            if not call.in_place:
                fetch[number].append(store(out[parts[call.rank]][mine], x[mine]))
            for peer in order:
                theirs, place = of(peer)
                fetch[number].append(store(out[parts[peer]][theirs], place))
    return _piped(bring, fetch)


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
    others, row = onward(call.rank, call.size), call.counts[call.rank]
    turns = _turns(row, x.itemsize, _PIECE_BYTES // max(call.size - 1, 1))
    longest = turns[0][1].stop
    shape = 2, call.size, longest
    places = [view.reshape(shape) for view in slot.views(2 * call.size * longest, call.dtype)]
    bring: list[list[Action]] = []
    fetch: list[list[Action]] = []
    for turn, piece in turns:
        length = piece.stop - piece.start
        rows = places[call.rank][turn]
        bring.append([store(rows[r][:length], x[parts[r]][piece]) for r in others])
        own = store(out[parts[call.rank]][piece], x[parts[call.rank]][piece])
        theirs = [(r, places[r][turn][call.rank][:length]) for r in others]
        fetch.append([own, *(store(out[parts[r]][piece], place) for r, place in theirs)])
    return _piped(bring, fetch)


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
