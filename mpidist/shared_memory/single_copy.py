"""Collectives of private arrays that each rank reads in the others' own memory.

The ranks note where their arrays lie before they are announced.  What is combined is fetched piece
by piece into memory that stays in cache, and each slice is fetched once more by those who need it.
Each kernel is an executor of the ``direct`` schedule of its collective, and so gives the same bits.
Collectives that only move data have no such form: it was no faster than the MPI library's own.

Every kernel ends with two barriers: until all have come to the first, others may be reading this
rank's arrays; and who comes to the second knows that nobody gave up before that.
"""

from __future__ import annotations

import numpy as np

from ..algorithms.relabel import onward
from ..backends import process_memory
from ..backends.executor import Executor
from ..backends.program import Action, Program
from ..calls.arrays import address
from ..calls.call import Call
from ..errors import RankFailed, Unsupported
from ..schedule.registry import Choice
from ..schedule.rounds import blocks
from .fold import PIECE_BYTES, fold
from .heap import Heap
from .in_place import NO_HEAP, SharedMemory, assemble
from .kernel import divisor, slices_of, unowned

_X, _OUT = range(2)  # the notes: where a rank's arrays lie
_LEAST_PIECE = 64 << 10  # bytes

Phases = list[list[Action]]


class Reach:
    """What a communicator has for such kernels, which run one at a time; made collectively.

    Attributes
    ----------
    heap : Heap
        By whose words the ranks meet.
    memory : ProcessMemory
        That of the other ranks.
    """

    def __init__(self, heap: Heap):
        self.memory = process_memory.connect(heap.rank, heap.everyone)
        heap.make_lines()
        self.heap = heap
        self._scratch = np.empty(PIECE_BYTES, np.uint8)
        self._result = np.empty(0, np.uint8)

    def result(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Give memory for the part of a result that another rank will fetch."""
        if self._result.nbytes < count * dtype.itemsize:
            self._result = np.empty(count * dtype.itemsize, np.uint8)
        return self._result[: count * dtype.itemsize].view(dtype)

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Give memory that all kernels use in turn, so that it is in the cache."""
        if self._scratch.nbytes < count * dtype.itemsize:
            self._scratch = np.empty(count * dtype.itemsize, np.uint8)
        return self._scratch[: count * dtype.itemsize].view(dtype)


class _Others:
    """The arrays of the other ranks in one operation."""

    def __init__(self, call: Call, reach: Reach, base: list[int]):
        self.reach, self._base, self._lines = reach, base, reach.heap.lines
        self._at = [[0] * call.size, [0] * call.size]
        arrays = ((_X, call.x), (_OUT, call.out))
        self._own = [(which, address(data)) for which, data in arrays if data is not None]

    def show(self, which: int, data: np.ndarray) -> None:
        """Have the others find `data`, which must live as long as this."""
        self._own = [(w, a) for w, a in self._own if w != which] + [(which, address(data))]
        self._held = data

    def announce(self) -> list[Action]:
        """Note where this rank's arrays lie."""
        lines, base, own = self._lines, self._base, self._own

        def tell() -> None:
            at = lines.notes(base, lines.rank)
            for which, where in own:
                lines.words[at + which] = where

        return [tell]

    def find(self) -> None:
        """Read the notes of all, who have come."""
        words, notes = self._lines.words, self._lines.notes
        starts = [notes(self._base, peer) for peer in range(self._lines.size)]
        for which, at in enumerate(self._at):
            at[:] = [words[start + which] for start in starts]

    def fetch(self, which: int, peer: int, part: slice, target: np.ndarray) -> Action:
        """Give what copies a part of an array of `peer` into `target`."""
        theirs, here, read = self._at[which], address(target), self.reach.memory.read
        offset, nbytes = part.start * target.itemsize, target.nbytes

        def act() -> None:
            try:
                read(peer, theirs[peer] + offset, here, nbytes)
            except OSError as error:
                raise RankFailed(
                    f"rank {self._lines.rank}: rank {peer} has left in the middle of the "
                    f"operation, or given back its array: {error.strerror}"
                ) from error

        return act


class SingleCopy(Executor):
    """Collectives of private arrays in the ranks' own memory."""

    name, summary = "single_copy", "every rank reads the others' private arrays"

    def __init__(self, host: SharedMemory):
        self._heap, self._reach = host.heap, None  # type: Heap | None, Reach | None
        self._reason = NO_HEAP if host.heap is None else None
        self.ready = host.heap is None

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return mostly that only reductions have such a form; the first use tries the rest."""
        if self._reason is not None:
            return self._reason
        if background:
            return "this is in the background"
        return None if call.collective in _KERNELS else f"{call.collective} has no such form"

    def make_ready(self) -> None:
        """Try to read the others' memory; collective."""
        assert self._heap is not None
        try:
            self._reach = Reach(self._heap)
        except (MemoryError, Unsupported) as error:
            self._reason = str(error)
        self.ready = True

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the executor's name: ranks that do without would wait for ever."""
        return self.name

    def bind(
        self,
        call: Call,
        choice: Choice | None,
        *,
        background: bool = False,
        repeated: bool = False,
        turn: int = 0,
    ) -> Program:
        """Bind the kernel to the arrays' addresses."""
        assert self._reach is not None
        return kernel(call, self._reach)


def kernel(call: Call, reach: Reach) -> Program:
    """Bind the kernel of a call to its arrays."""
    base = [0]
    others = _Others(call, reach, base)
    first, *more = _KERNELS[call.collective](call, others)
    phases = [[others.find, *first], *more, [], []]
    return assemble((others.announce(), phases), reach.heap, base)


def _combine(call: Call, others: _Others, mine: slice, out: np.ndarray) -> list[Action]:
    """Combine the slice `mine` of all inputs into `out`, which is as long."""
    assert call.x is not None and call.op is not None
    x, size, itemsize = unowned(call.x), call.size, max(call.dtype.itemsize, 1)
    piece = max(_LEAST_PIECE, PIECE_BYTES // size) // itemsize
    piece = max(1, min(piece, mine.stop - mine.start))
    scratch = others.reach.scratch(piece * size, call.dtype).reshape(size, piece)
    kept: dict[str, np.ndarray] = {}
    actions: list[Action] = []
    for start in range(mine.start, mine.stop, piece):
        part = slice(start, min(start + piece, mine.stop))
        inputs = list(scratch[:, : part.stop - start])
        actions += [others.fetch(_X, r, part, inputs[r]) for r in onward(call.rank, size)]
        inputs[call.rank] = x[part]
        target = out[start - mine.start : part.stop - mine.start]
        actions += fold(call.op, inputs, call.rank, [target], divisor(call), kept)
    return actions


def _allreduce(call: Call, others: _Others) -> Phases:
    """A slice each; then the others' slices are fetched from where their owners stored them."""
    assert call.x is not None and call.out is not None
    out, parts = unowned(call.out), blocks(call.x.size, call.size)
    mine = parts[call.rank]
    combine = _combine(call, others, mine, out[mine])
    order = onward(call.rank, call.size)
    return [combine, [others.fetch(_OUT, r, parts[r], out[parts[r]]) for r in order]]


def _reduce(call: Call, others: _Others) -> Phases:
    """A slice each, which the root fetches from where its owner kept it."""
    assert call.x is not None
    parts = blocks(call.x.size, call.size)
    mine = parts[call.rank]
    if call.rank != call.root:
        kept = others.reach.result(mine.stop - mine.start, call.dtype)
        others.show(_OUT, kept)
        return [_combine(call, others, mine, kept), []]
    assert call.out is not None
    out = unowned(call.out)
    combine = _combine(call, others, mine, out[mine])
    order = onward(call.rank, call.size)
    whole = [slice(0, parts[r].stop - parts[r].start) for r in order]
    return [combine, [others.fetch(_OUT, r, w, out[parts[r]]) for r, w in zip(order, whole)]]


def _reduce_scatter(call: Call, others: _Others) -> Phases:
    assert call.out is not None
    return [_combine(call, others, slices_of(call.counts)[call.rank], unowned(call.out))]


_KERNELS = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}
