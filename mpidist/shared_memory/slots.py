"""The ``staged`` executor: collectives of private arrays through slots of shared memory.

A rank copies the data that the others need into its slot, announces its arrival, and reads the
others' slots when all ranks have arrived.  Two slots take turns, so no rank waits until its slot
has been read: it is used again when every rank has arrived at a later call.  Long arrays go piece
by piece through the two halves of a slot, a barrier between the pieces::

    half 0   write piece 0 |  read piece 0 | write piece 2 |  read piece 2 | …
    half 1                 | write piece 1 |  read piece 1 | write piece 3 | …

Each kernel combines in the order of the ``direct`` schedule of its collective, so the result has
the same bits.
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
from .heap import STAGING_BYTES, Heap, Location
from .host import Host
from .in_place import NO_HEAP
from .kernel import Body, assemble, combine, combine_all, one_shot, pieces_of, slices_of, unowned

_PIECE_BYTES = 64 << 10  # 32 and 128 KiB took 1.05 to 1.1 times as long, from 512 KiB on, 2 ranks
_MAX_SHARED_BYTES = 1 << 20  # largest calls that share a program; at 2 MiB copying costs as much


class Staged(Executor):
    """Executor of collectives of private arrays, copied through two slots of shared memory."""

    name, summary = "staged", "every rank copies its data into shared memory, where others read it"
    turns = 2

    def __init__(self, host: Host):
        self._heap = host.heap
        self._reason = NO_HEAP if host.heap is None else None
        self.ready = host.heap is None

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return why the call cannot be served, usually too long an array; None if it can."""
        if self._reason is not None:
            return self._reason
        if background:
            return "it cannot run in the background"
        return why_not(call)

    def make_ready(self) -> None:
        """Allocate the slots; collective.

        If that fails, :meth:`why_not` returns the reason from then on.
        """
        assert self._heap is not None
        try:
            self._heap.make_staging()
        except (MemoryError, Unsupported) as error:
            self._reason = str(error)
        self.ready = True

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the executor's name for comparison: ranks with different executors would hang."""
        return self.name

    def kind(self, call: Call) -> Hashable:
        """Return a key: calls with equal keys share one program; None if the call needs its own.

        A shared program has arrays of its own, through which it serves calls with any arrays.
        Long calls and reductions by a user's function need their own program.
        """
        if call.nbytes > _MAX_SHARED_BYTES or not (call.op is None or call.op.builtin):
            return None
        op = None if call.op is None else call.op.name
        input_size = -1 if call.x is None else call.x.size
        output_size = -1 if call.out is None else call.out.size
        return call.collective, call.dtype, call.root, op, call.counts, input_size, output_size

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Return the program of the call's kernel, bound to slot number `turn`."""
        assert self._heap is not None
        return kernel(call, self._heap, turn)


def kernel(call: Call, heap: Heap, slot: int) -> Program:
    """Return the program that performs a call through staging slot 0 or 1: its kernel, bound."""
    return assemble(_KERNELS[call.collective](call, heap.slot(slot)), heap, [0], slot)


def why_not(call: Call) -> str | None:
    """Return why a call cannot go through the slots, or None if it can."""
    if call.collective not in _KERNELS:
        return f"there is no staged kernel of {call.collective}"
    if call.uneven_alltoall:
        return "the counts of the other ranks are unknown (uneven alltoall)"
    if call.nbytes > STAGING_BYTES:
        return f"its {call.nbytes} bytes exceed the {STAGING_BYTES >> 20} MiB of a staging slot"
    return None


def _allreduce(call: Call, slot: Location) -> Body:
    """Return the kernel of allreduce: one shot for short arrays (see `one_shot`), else two.

    One shot: every rank combines everything.  Two shots: every rank combines its slice and then
    reads the others' results.  Either way the order within a slice is that of its owner (see
    :func:`~mpidist.shared_memory.fold.fold`), so the bits are the same on all ranks.
    """
    assert call.x is not None and call.out is not None
    if not one_shot(call):
        return _two_shot(call, slot, unowned(call.out), onward(call.rank, call.size))
    before, inputs = _copy_in(call, slot, [slice(0, call.x.size)])
    return before, [combine_all(call, inputs, unowned(call.out))]


def _reduce(call: Call, slot: Location) -> Body:
    """Return the kernel of reduce: one shot for short arrays (see `one_shot`), else two.

    One shot: the root combines everything.  Two shots: every rank combines a slice, and the root
    reads the results.
    """
    assert call.x is not None
    here = call.rank == call.root
    if not one_shot(call):
        others = onward(call.rank, call.size) if here else []
        return _two_shot(
            call, slot, unowned(call.out) if here and call.out is not None else None, others
        )
    if not here:
        return _copy_in(call, slot, [slice(0, call.x.size)])[0], [[]]
    assert call.out is not None
    inputs = _copy_in(call, slot, [])[1]
    return [], [combine_all(call, inputs, unowned(call.out))]


def _copy_in(
    call: Call, slot: Location, parts: list[slice]
) -> tuple[list[Action], list[np.ndarray]]:
    """Return actions that copy `parts` of the input to this rank's slot, and views of all inputs.

    The inputs are by rank: those of other ranks are views of their slots.
    """
    assert call.x is not None
    x, slots = unowned(call.x), slot.views(call.x.size, call.dtype)
    copies: list[Action] = [store(slots[call.rank][part], x[part]) for part in parts]
    return copies, [x if peer == call.rank else view for peer, view in enumerate(slots)]


def _two_shot(call: Call, slot: Location, out: np.ndarray | None, others: Sequence[int]) -> Body:
    """Return a kernel in which each rank combines a slice, and then reads the slices of `others`.

    The others read a rank's slice in the shadow (scratch memory) of its slot.  `out` is None on a
    rank that gets no result.
    """
    assert call.x is not None
    parts, mine = blocks(call.x.size, call.size), blocks(call.x.size, call.size)[call.rank]
    needed = [parts[peer] for peer in onward(call.rank, call.size)]
    before, inputs = _copy_in(call, slot, needed)
    results = [slot.shadow(rank, call.x.size, call.dtype) for rank in range(call.size)]
    target = results[call.rank][mine] if out is None else out[mine]
    work = combine(call, inputs, call.rank, mine, target)
    if out is not None and call.collective == "allreduce":
        work.append(store(results[call.rank][mine], target))
    fetch: list[Action] = []
    if out is not None:
        fetch = [store(out[parts[r]], results[r][parts[r]]) for r in others]
    return before, [work, fetch]


def _reduce_scatter(call: Call, slot: Location) -> Body:
    assert call.out is not None
    parts = slices_of(call.counts)
    needed = [parts[peer] for peer in onward(call.rank, call.size)]
    before, inputs = _copy_in(call, slot, needed)
    return before, [combine(call, inputs, call.rank, parts[call.rank], unowned(call.out))]


def _alternating_pieces(count: int, itemsize: int, nbytes: int) -> list[tuple[int, slice]]:
    """Cut `count` elements into pieces; return each as (half of the slot, slice of elements).

    There are at most eight pieces, of `nbytes` or more except the last.  The halves 0 and 1
    alternate, so both stay in the cache.  More pieces would make binding too slow for an array that
    is used in one call only.
    """
    piece = max(nbytes // max(itemsize, 1), -(-count // 8), 1)
    return list(zip(cycle((0, 1)), pieces_of(count, 1, piece)))


def _pipelined(writes: list[list[Action]], reads: list[list[Action]]) -> Body:
    """Return the kernel that writes each piece in the phase in which it reads the piece before.

    Parameters
    ----------
    writes, reads : list of list of callable
        By piece, the actions that copy it into this rank's slot, and out of the others' slots.
    """
    later = [*writes[1:], []]
    return writes[0], [[*read, *write] for read, write in zip(reads, later)]


def _allgather(call: Call, slot: Location) -> Body:
    return _exchange_parts(call, slot, sends=True, receives=True)


def _broadcast(call: Call, slot: Location) -> Body:
    """Return the kernel of broadcast: the root writes a piece while the others read the one before.

    1 MiB takes 0.75 of the time that it took with separate memory for each piece (2 ranks).
    """
    assert call.out is not None
    out = unowned(call.out)
    split = _alternating_pieces(out.size, out.itemsize, _PIECE_BYTES)
    longest = split[0][1].stop
    halves = slot.views(2 * longest, call.dtype)[call.root].reshape(2, longest)
    pieces = [(part, halves[half][: part.stop - part.start]) for half, part in split]
    if call.rank != call.root:
        return [], [[store(out[part], buffer)] for part, buffer in pieces]
    x = out if call.x is None else unowned(call.x)
    first, *others = [[store(buffer, x[part])] for part, buffer in pieces]
    last: list[Action] = [] if call.in_place or call.x is None else [store(out, x)]
    return first, [*others, last]


def _gather(call: Call, slot: Location) -> Body:
    here = call.rank == call.root
    return _exchange_parts(call, slot, sends=not here, receives=here)


def _exchange_parts(call: Call, slot: Location, sends: bool, receives: bool) -> Body:
    """Return the kernel of allgather and gather: concatenate the ranks' parts in `out`.

    Parameters
    ----------
    sends, receives : bool
        Whether this rank writes its part to its slot, and whether it gets the result.
    """
    assert call.x is not None
    x, counts, order = unowned(call.x), call.counts, onward(call.rank, call.size)
    split = _alternating_pieces(max(counts), x.itemsize, _PIECE_BYTES)
    longest = split[0][1].stop
    slots = [view.reshape(2, longest) for view in slot.views(2 * longest, call.dtype)]
    writes: list[list[Action]] = [[] for _ in split]
    reads: list[list[Action]] = [[] for _ in split]
    for number, (half, piece) in enumerate(split):

        def part_of(rank: int, half: int = half, piece: slice = piece) -> tuple[slice, np.ndarray]:
            part = slice(min(piece.start, counts[rank]), min(piece.stop, counts[rank]))
            return part, slots[rank][half][: part.stop - part.start]

        mine, buffer = part_of(call.rank)
        if sends:
            writes[number] = [store(buffer, x[mine])]
        if receives:
            assert call.out is not None
            out, parts = unowned(call.out), slices_of(counts)
            if not call.in_place:
                reads[number].append(store(out[parts[call.rank]][mine], x[mine]))
            for peer in order:
                theirs, buffer = part_of(peer)
                reads[number].append(store(out[parts[peer]][theirs], buffer))
    return _pipelined(writes, reads)


def _scatter(call: Call, slot: Location) -> Body:
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


def _alltoall(call: Call, slot: Location) -> Body:
    assert call.x is not None and call.out is not None
    x, out, parts = unowned(call.x), unowned(call.out), slices_of(call.counts)
    others, row = onward(call.rank, call.size), call.counts[call.rank]
    split = _alternating_pieces(row, x.itemsize, _PIECE_BYTES // max(call.size - 1, 1))
    longest = split[0][1].stop
    shape = 2, call.size, longest
    slots = [view.reshape(shape) for view in slot.views(2 * call.size * longest, call.dtype)]
    writes: list[list[Action]] = []
    reads: list[list[Action]] = []
    for half, piece in split:
        length = piece.stop - piece.start
        rows = slots[call.rank][half]
        writes.append([store(rows[r][:length], x[parts[r]][piece]) for r in others])
        own = store(out[parts[call.rank]][piece], x[parts[call.rank]][piece])
        theirs = [(r, slots[r][half][call.rank][:length]) for r in others]
        reads.append([own, *(store(out[parts[r]][piece], buffer) for r, buffer in theirs)])
    return _pipelined(writes, reads)


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
