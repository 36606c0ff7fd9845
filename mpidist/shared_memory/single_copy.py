"""The ``single_copy`` executor: reductions of private arrays, read in the other processes' memory.

Each rank notes the addresses of its arrays before it is announced.  It fetches its slice of the
other ranks' inputs piece by piece into scratch memory that stays in cache, and combines it there;
the ranks that need the slice fetch it once more from its owner.  Each kernel combines in the order
of the ``direct`` schedule of its collective, so the result has the same bits.  There are no kernels
of collectives that only move data: they were no faster than those of the MPI library.

Every kernel ends with two barriers.  Until all ranks have reached the first, others may be reading
this rank's arrays; a rank that reaches the second has not given up while it read.
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
from .host import Host
from .in_place import NO_HEAP
from .kernel import assemble, divisor, slices_of, unowned

_X, _OUT = range(2)  # a rank's notes: addresses of its input and its result
_LEAST_PIECE = 64 << 10  # bytes

Phases = list[list[Action]]


class Workspace:
    """The reader of other ranks' memory and the scratch memory of a communicator's kernels.

    The kernels share it, as they run one at a time.  Its creation is collective.

    Attributes
    ----------
    heap : Heap
        The heap with the barrier counters.
    memory : ProcessMemory
        Reader of the other ranks' memory.
    """

    def __init__(self, heap: Heap):
        self.memory = process_memory.connect(heap.rank, heap.everyone)
        heap.make_lines()
        self.heap = heap
        self._scratch = np.empty(PIECE_BYTES, np.uint8)
        self._result = np.empty(0, np.uint8)

    def result(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return memory for `count` elements of a result that the root will fetch.

        All kernels share it in turn.
        """
        if self._result.nbytes < count * dtype.itemsize:
            self._result = np.empty(count * dtype.itemsize, np.uint8)
        return self._result[: count * dtype.itemsize].view(dtype)

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return scratch memory of `count` elements, which all kernels share in turn.

        So it stays in the cache.
        """
        if self._scratch.nbytes < count * dtype.itemsize:
            self._scratch = np.empty(count * dtype.itemsize, np.uint8)
        return self._scratch[: count * dtype.itemsize].view(dtype)


class _PeerArrays:
    """Addresses of the other ranks' arrays in one call, and actions that read these arrays."""

    def __init__(self, call: Call, workspace: Workspace, tags: list[int]):
        self.workspace, self._tags, self._lines = workspace, tags, workspace.heap.lines
        self._addresses = [[0] * call.size, [0] * call.size]
        arrays = ((_X, call.x), (_OUT, call.out))
        self._own = [(which, address(data)) for which, data in arrays if data is not None]

    def publish(self, which: int, data: np.ndarray) -> None:
        """Make :meth:`announce` note the address of `data` instead of the call's input or result.

        `which` is `_X` for the input, `_OUT` for the result.  `data` is kept alive.
        """
        self._own = [(w, a) for w, a in self._own if w != which] + [(which, address(data))]
        self._published = data

    def announce(self) -> list[Action]:
        """Return the action that writes this rank's addresses to its notes in shared memory.

        To be run before this rank announces its arrival.  The action is in a list.
        """
        lines, tags, own = self._lines, self._tags, self._own

        def write_notes() -> None:
            at = lines.note_index(tags, lines.rank)
            for which, start in own:
                lines.words[at + which] = start

        return [write_notes]

    def read_addresses(self) -> None:
        """Read the addresses of all ranks' arrays from their notes, once all ranks have arrived."""
        words, note_index = self._lines.words, self._lines.note_index
        starts = [note_index(self._tags, peer) for peer in range(self._lines.size)]
        for which, at in enumerate(self._addresses):
            at[:] = [words[start + which] for start in starts]

    def fetch(self, which: int, peer: int, part: slice, target: np.ndarray) -> Action:
        """Return the action that copies slice `part` of an array of `peer` into `target`.

        `which` is `_X` for the input of `peer`, `_OUT` for its result.
        """
        addresses, start, read = self._addresses[which], address(target), self.workspace.memory.read
        offset, nbytes = part.start * target.itemsize, target.nbytes

        def action() -> None:
            try:
                read(peer, addresses[peer] + offset, start, nbytes)
            except OSError as error:
                raise RankFailed(
                    f"rank {self._lines.rank}: rank {peer} has left in the middle of the "
                    f"operation, or has freed its array: {error.strerror}"
                ) from error

        return action


class SingleCopy(Executor):
    """Executor of reductions of private arrays, which ranks read in each other's processes."""

    name, summary = "single_copy", "every rank reads the others' private arrays"

    def __init__(self, host: Host):
        self._heap, self._workspace = host.heap, None  # type: Heap | None, Workspace | None
        self._reason = NO_HEAP if host.heap is None else None
        self.ready = host.heap is None

    def why_not(self, call: Call, background: bool) -> str | None:
        """Return why the call cannot be served, or None if it can.

        Whether the ranks can read each other's memory is known after `make_ready`.
        """
        if self._reason is not None:
            return self._reason
        if background:
            return "it cannot run in the background"
        return (
            None
            if call.collective in _KERNELS
            else f"there is no single-copy kernel of {call.collective}"
        )

    def make_ready(self) -> None:
        """Check, once, that all ranks can read each other's memory; collective.

        If not, :meth:`why_not` returns the reason from then on.
        """
        assert self._heap is not None
        try:
            self._workspace = Workspace(self._heap)
        except (MemoryError, Unsupported) as error:
            self._reason = str(error)
        self.ready = True

    def agreed(self, call: Call, choice: Choice | None) -> str:
        """Return the executor's name for comparison: ranks with different executors would hang."""
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
        """Return the program of the call's kernel, bound to the arrays' addresses."""
        assert self._workspace is not None
        return kernel(call, self._workspace)


def kernel(call: Call, workspace: Workspace) -> Program:
    """Return the program that performs a call by single copies: its kernel, bound to the arrays."""
    tags = [0]
    peers = _PeerArrays(call, workspace, tags)
    first, *more = _KERNELS[call.collective](call, peers)
    phases = [[peers.read_addresses, *first], *more, [], []]
    return assemble((peers.announce(), phases), workspace.heap, tags)


def _combine(call: Call, peers: _PeerArrays, mine: slice, out: np.ndarray) -> list[Action]:
    """Return the actions that combine slice `mine` of all inputs into `out`, of its length."""
    assert call.x is not None and call.op is not None
    x, size, itemsize = unowned(call.x), call.size, max(call.dtype.itemsize, 1)
    piece = max(_LEAST_PIECE, PIECE_BYTES // size) // itemsize
    piece = max(1, min(piece, mine.stop - mine.start))
    scratch = peers.workspace.scratch(piece * size, call.dtype).reshape(size, piece)
    fold_scratch: dict[str, np.ndarray] = {}
    actions: list[Action] = []
    for start in range(mine.start, mine.stop, piece):
        part = slice(start, min(start + piece, mine.stop))
        inputs = list(scratch[:, : part.stop - start])
        actions += [peers.fetch(_X, r, part, inputs[r]) for r in onward(call.rank, size)]
        inputs[call.rank] = x[part]
        target = out[start - mine.start : part.stop - mine.start]
        actions += fold(call.op, inputs, call.rank, [target], divisor(call), fold_scratch)
    return actions


def _allreduce(call: Call, peers: _PeerArrays) -> Phases:
    """Return the phases of allreduce: combine one slice in `out`, then fetch the others' slices."""
    assert call.x is not None and call.out is not None
    out, parts = unowned(call.out), blocks(call.x.size, call.size)
    mine = parts[call.rank]
    combine = _combine(call, peers, mine, out[mine])
    order = onward(call.rank, call.size)
    return [combine, [peers.fetch(_OUT, r, parts[r], out[parts[r]]) for r in order]]


def _reduce(call: Call, peers: _PeerArrays) -> Phases:
    """Return the phases of reduce: each rank combines a slice, then the root fetches the slices."""
    assert call.x is not None
    parts = blocks(call.x.size, call.size)
    mine = parts[call.rank]
    if call.rank != call.root:
        result = peers.workspace.result(mine.stop - mine.start, call.dtype)
        peers.publish(_OUT, result)
        return [_combine(call, peers, mine, result), []]
    assert call.out is not None
    out = unowned(call.out)
    combine = _combine(call, peers, mine, out[mine])
    order = onward(call.rank, call.size)
    whole = [slice(0, parts[r].stop - parts[r].start) for r in order]
    return [combine, [peers.fetch(_OUT, r, w, out[parts[r]]) for r, w in zip(order, whole)]]


def _reduce_scatter(call: Call, peers: _PeerArrays) -> Phases:
    assert call.out is not None
    return [_combine(call, peers, slices_of(call.counts)[call.rank], unowned(call.out))]


_KERNELS = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}
