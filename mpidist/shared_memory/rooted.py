"""Kernels in symmetric memory of reduce, gather and scatter, whose root may have a private array.

An array that only the root has need not be symmetric.  The root notes its location before it is
announced.  Ranks that can reach the array there read or write it themselves; if it is private
memory, or a rank has unmapped it, the root copies that rank's part.

The ``symmetric`` executor binds these kernels; of the other collectives it runs the schedules
``in_place``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..backends.program import Action, Program, store
from ..calls.arrays import view_at
from ..calls.call import Call
from ..schedule.rounds import blocks
from .compiled import streams
from .conditional import ConditionalAction, TargetedAction
from .fold import fold
from .heap import Heap, Location
from .kernel import Body, Phase, assemble, divisor, slices_of, unowned

# A rank's notes: allocation number and offset of its array; whether it cannot reach the root's.
_NUMBER, _OFFSET, _UNREACHED = range(3)


class RootArray:
    """The root's array in one kernel, which the other ranks find by its location in shared memory.

    The root writes the location to its notes, words in shared memory.  A rank cannot reach the
    array if it is private memory, or if the rank has unmapped it.  In gather and scatter the other
    ranks note the locations of their parts, so that the root can copy the parts of such ranks.

    Parameters
    ----------
    heap : Heap
        The symmetric memory.
    tags : list of int
        ``Program.tags`` of the kernel: one number, the set of barrier counters and notes in
        ``heap.lines`` that a run uses; 0 in blocking calls.
    root : int
        The root.
    count : int
        Number of elements of the root's array.
    dtype : dtype
        Dtype of all arrays of the call.
    """

    def __init__(self, heap: Heap, tags: list[int], root: int, count: int, dtype: np.dtype):
        self._heap, self._tags, self._root = heap, tags, root
        self._count, self._dtype = count, dtype
        self._noted = (0, 0)
        self._location: Location | None = None
        self._view: np.ndarray | None = None
        self._watch: weakref.ref | None = None

    def announce(self, x: np.ndarray) -> list[Action]:
        """Return the action that writes the location of `x` to this rank's notes, in a list.

        To be run before this rank announces its arrival.
        """
        location, lines, tags = self._heap.find(x), self._heap.lines, self._tags
        noted = (0, 0) if location is None else (location.allocation.number, location.offset)
        words = lines.words

        def write_notes() -> None:
            at = lines.note_index(tags, lines.rank)
            words[at + _NUMBER], words[at + _OFFSET] = noted

        return [
            ConditionalAction(words, self._words(lines.rank, _NUMBER, _OFFSET), noted, write_notes)
        ]

    def _words(self, rank: int, *notes: int) -> list[int]:
        """Return the indices in ``lines.words`` of some notes of a rank, those of blocking calls.

        Each pending operation has notes of its own, see :class:`BarrierLines`; an action's target
        depends on those of blocking calls only.  `notes` are numbers: `_NUMBER`, `_OFFSET` (the
        location), `_UNREACHED`.
        """
        first = self._heap.lines.note_index([0], rank)
        return [first + note for note in notes]

    def targeted(self, bind: Callable[[np.ndarray | None], list[Action]]) -> TargetedAction:
        """On a rank other than the root: return an action whose target is the root's array.

        Parameters
        ----------
        bind : callable
            ``bind(array)`` returns the actions for the root's array, or for None where this rank
            cannot reach it.
        """
        # noted        the root writes (number, offset) of its array before it is announced
        #   ↓
        # found        `find` views the array, and the actions are bound to the view, or to None
        #   ↓          where it is not mapped here: then it is searched for in every call
        # watched      the notes are expected from now on: compiled code compares them, no search
        #   ↓
        # invalidated  other notes, or the mapping's owner died here: back to found in the next call
        lines = self._heap.lines
        target: Any = self  # not bound yet: unlike any array, and None
        indices = [*self._words(self._root, _NUMBER, _OFFSET), *self._words(lines.rank, _UNREACHED)]

        def find(action: TargetedAction) -> list[Action]:
            nonlocal target
            found = self.find()
            bound = action.bound if found is target else bind(found)
            target = found
            if found is not None and self._location is not None:
                self._watch = weakref.ref(self._location.allocation.owner_ref(), action.invalidate)
                action.set_expected([*self._noted, 0])
            else:
                action.invalidate()
            return bound

        return TargetedAction(lines.words, indices, find)

    def phases_without_waiting(self, action: Action) -> list[Phase | list[Action]]:
        """On a rank other than the root: return three phases: `action`, then two empty ones.

        The rank waits for no other rank, except, in the last barrier, for a root that has to copy
        the rank's part.
        """
        mine = self._words(self._heap.lines.rank, _UNREACHED)
        awaits = ConditionalAction(self._heap.lines.words, mine, [0], self._awaited_ranks)
        return [[action], Phase([], ()), Phase([], awaits)]

    def _awaited_ranks(self) -> tuple[int, ...]:
        return (self._root,) if self._view is None else ()

    def find(self) -> np.ndarray | None:
        """On a rank other than the root: return a view of the root's array, None if unreachable.

        It also notes for the root whether the array is unreachable.  The view is made again only if
        the array has moved: making one takes 3 µs, or 15 if the caches are cold.
        """
        noted, location = self._read(self._root), self._location
        if noted != self._noted or location is None or location.allocation.owner_ref() is None:
            self._noted, self._location = noted, self._heap.location(*noted)
            self._view = None
            if self._location is not None:
                self._view = view_at(self._location.address(self._root), self._count, self._dtype)
        lines = self._heap.lines
        lines.words[lines.note_index(self._tags, lines.rank) + _UNREACHED] = self._view is None
        return self._view

    def _read(self, rank: int) -> tuple[int, int]:
        lines = self._heap.lines
        at = lines.note_index(self._tags, rank)
        return lines.words[at + _NUMBER], lines.words[at + _OFFSET]

    def array_of(self, rank: int, count: int) -> np.ndarray:
        """On the root: return a view of the `count` elements whose location `rank` noted.

        They lie in an allocation that all ranks have mapped.
        """
        location = self._heap.location(*self._read(rank))
        assert location is not None
        return view_at(location.address(rank), count, self._dtype)

    def serve_unreached(self, copy_part: Callable[[int], Any]) -> ConditionalAction:
        """On the root: return the action, for after a barrier, that copies unreached ranks' parts.

        A rank is unreached if it cannot reach the root's array.

        Parameters
        ----------
        copy_part : callable
            ``copy_part(rank)`` copies the part of `rank`.
        """
        others = [rank for rank in range(self._heap.size) if rank != self._root]
        indices = [index for rank in others for index in self._words(rank, _UNREACHED)]

        def copy_all() -> None:
            for rank in self.unreached():
                copy_part(rank)

        return ConditionalAction(self._heap.lines.words, indices, [0] * len(indices), copy_all)

    def unreached(self) -> list[int]:
        """On the root, after a barrier: return the ranks that cannot reach the root's array."""
        lines, ranks = self._heap.lines, range(self._heap.size)
        return [
            rank
            for rank in ranks
            if rank != self._root and lines.words[lines.note_index(self._tags, rank) + _UNREACHED]
        ]


def reduce(call: Call, location: Location, heap: Heap, tags: list[int]) -> Body:
    """Return the kernel of reduce: each rank combines a slice and stores it in the root's `out`.

    A rank that cannot reach `out` stores its slice in the shadow of the root's `x`.
    """
    assert call.x is not None and call.op is not None
    parts = blocks(call.x.size, call.size)
    mine = parts[call.rank]
    views = location.views(call.x.size, call.dtype)
    inputs, streamed = [x[mine] for x in views], streams(call.nbytes)
    combine_into = partial(
        fold, call.op, inputs, call.rank, divisor=divisor(call), streamed=streamed
    )
    shadow = location.shadow(call.root, call.x.size, call.dtype)
    root_array = RootArray(heap, tags, call.root, call.x.size, call.dtype)
    if call.rank == call.root:
        assert call.out is not None
        out = unowned(call.out)

        def fetch(rank: int) -> None:
            out[parts[rank]] = shadow[parts[rank]]

        return root_array.announce(call.out), [
            combine_into([out[mine]]),
            [root_array.serve_unreached(fetch)],
        ]

    def combine(target: np.ndarray | None) -> list[Action]:
        return combine_into([(shadow if target is None else target)[mine]])

    return [], [[root_array.targeted(combine)], []]


def gather(call: Call, location: Location, heap: Heap, tags: list[int]) -> Body:
    """Return the kernel of gather: each rank stores its part in the root's `out`.

    The root fetches the parts of ranks that cannot reach `out`.  The ranks' parts may lie at
    different offsets of one allocation: in an in-place call the root's part lies inside `out`.
    """
    parts, mine = slices_of(call.counts), slices_of(call.counts)[call.rank]
    root_array = RootArray(heap, tags, call.root, sum(call.counts), call.dtype)
    if call.rank != call.root:
        assert call.x is not None
        x = unowned(call.x)

        def deliver(target: np.ndarray | None) -> list[Action]:
            return [] if target is None else [store(target[mine], x)]

        return root_array.announce(call.x), root_array.phases_without_waiting(
            root_array.targeted(deliver)
        )
    assert call.x is not None and call.out is not None
    out, counts = unowned(call.out), call.counts  # `call` would keep its arrays alive

    def fetch(rank: int) -> None:
        out[parts[rank]] = root_array.array_of(rank, counts[rank])

    own: list[Action] = []
    if not call.in_place:
        own.append(store(out[mine], unowned(call.x)))
    return root_array.announce(call.out), [
        own,
        [root_array.serve_unreached(fetch)],
        Phase([], ()),
    ]


def scatter(call: Call, location: Location, heap: Heap, tags: list[int]) -> Body:
    """Return the kernel of scatter: each rank reads its part of the root's `x`.

    The root stores the parts of ranks that cannot reach its `x`.
    """
    parts, mine = slices_of(call.counts), slices_of(call.counts)[call.rank]
    root_array = RootArray(heap, tags, call.root, sum(call.counts), call.dtype)
    if call.rank != call.root:
        assert call.out is not None
        out = unowned(call.out)

        def fetch(source: np.ndarray | None) -> list[Action]:
            return [] if source is None else [store(out, source[mine])]

        return root_array.announce(call.out), root_array.phases_without_waiting(
            root_array.targeted(fetch)
        )
    assert call.x is not None and call.out is not None
    x, counts = unowned(call.x), call.counts

    def put(rank: int) -> None:
        root_array.array_of(rank, counts[rank])[...] = x[parts[rank]]

    own: list[Action] = []
    if not call.in_place:
        own.append(store(unowned(call.out), x[mine]))
    return root_array.announce(call.x), [own, [root_array.serve_unreached(put)], Phase([], ())]


def kernel(call: Call, location: Location, heap: Heap) -> Program:
    """Return the program of a reduce, gather or scatter, whose symmetric array is at `location`."""
    tags = [0]
    return assemble(_KERNELS[call.collective](call, location, heap, tags), heap, tags)


_KERNELS = {"reduce": reduce, "gather": gather, "scatter": scatter}
