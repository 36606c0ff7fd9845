"""Kernels of the collectives with a root, some of whose arrays only the root has.

The root notes where its array lies before it is announced.  Where that is private, or a rank has
given back its own mapping of it, the work of that rank falls to the root.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..backends.program import Action, store
from ..calls.arrays import view_at
from ..calls.call import Call
from ..schedule.rounds import blocks
from .compiled import streams
from .conditional import Aimed, Unless
from .fold import fold
from .heap import Heap, Place
from .kernel import Body, Phase, combine_all, copier, divisor, one_shot, slices_of, unowned

_NUMBER, _OFFSET, _LEFT = range(3)  # the notes: of an allocation, a place in it, work for the root


class RootArray:
    """An array of the root that the others may reach; and those of the others, for what is left.

    Parameters
    ----------
    heap : Heap
        The symmetric memory.
    base : list of int
        Tells the operations apart that are under way together.
    root : int
        Whose array it is.
    count : int
        Its elements.
    dtype : dtype
        Of those, and of what the others have.
    """

    def __init__(self, heap: Heap, base: list[int], root: int, count: int, dtype: np.dtype):
        self._heap, self._base, self._root = heap, base, root
        self._count, self._dtype = count, dtype
        self._noted = (0, 0)
        self._place: Place | None = None
        self._view: np.ndarray | None = None
        self._watch: weakref.ref | None = None

    def announce(self, x: np.ndarray) -> list[Action]:
        """Note where this rank's `x` lies, before it is announced as having come."""
        place, lines, base = self._heap.find(x), self._heap.lines, self._base
        noted = (0, 0) if place is None else (place.allocation.number, place.offset)
        words = lines.words

        def tell() -> None:
            at = lines.notes(base, lines.rank)
            words[at + _NUMBER], words[at + _OFFSET] = noted

        return [Unless(words, self._words(lines.rank, _NUMBER, _OFFSET), noted, tell)]

    def _words(self, rank: int, *notes: int) -> list[int]:
        """Give the indices of notes of a rank in a blocking call."""
        first = self._heap.lines.notes([0], rank)
        return [first + note for note in notes]

    def aimed(self, bind: Callable[[np.ndarray | None], list[Action]]) -> Aimed:
        """On the others: give the action that does what is bound to the root's array.

        Where that is out of reach, it is bound to None.
        """
        lines = self._heap.lines
        target: Any = self  # no array yet
        places = [*self._words(self._root, _NUMBER, _OFFSET), *self._words(lines.rank, _LEFT)]

        def find(aimed: Aimed) -> list[Action]:
            nonlocal target
            found = self.find()
            bound = aimed.bound if found is target else bind(found)
            target = found
            if found is not None and self._place is not None:
                self._watch = weakref.ref(self._place.allocation.holder(), aimed.doubt)
                aimed.expect([*self._noted, 0])
            else:
                aimed.doubt()
            return bound

        return Aimed(lines.words, places, find)

    def leave(self, act: Action) -> list[Phase | list[Action]]:
        """On the others: give the phases of a rank that does `act` and need not wait for anyone.

        But for the root, if that has this rank's work to do.
        """
        mine = self._words(self._heap.lines.rank, _LEFT)
        whom = Unless(self._heap.lines.words, mine, [0], self._whom)
        return [[act], Phase([], tuple), Phase([], whom)]

    def _whom(self) -> tuple[int, ...]:
        return (self._root,) if self._view is None else ()

    def find(self) -> np.ndarray | None:
        """On the others: give the root's array, None where it is out of reach.

        It is the same view as long as the array is: making one takes 3 µs, or 15 if the caches are
        cold.
        """
        noted, place = self._read(self._root), self._place
        if noted != self._noted or place is None or place.allocation.holder() is None:
            self._noted, self._place = noted, self._heap.place(*noted)
            self._view = None
            if self._place is not None:
                self._view = view_at(self._place.address(self._root), self._count, self._dtype)
        lines = self._heap.lines
        lines.words[lines.notes(self._base, lines.rank) + _LEFT] = self._view is None
        return self._view

    def _read(self, rank: int) -> tuple[int, int]:
        lines = self._heap.lines
        at = lines.notes(self._base, rank)
        return lines.words[at + _NUMBER], lines.words[at + _OFFSET]

    def theirs(self, rank: int, count: int) -> np.ndarray:
        """On the root: give what `rank` announced, which lies in an allocation that all hold."""
        place = self._heap.place(*self._read(rank))
        assert place is not None
        return view_at(place.address(rank), count, self._dtype)

    def collect(self, fetch: Callable[[int], Any]) -> Unless:
        """On the root, after a barrier: give the action that does the work that is left to it."""
        others = [rank for rank in range(self._heap.size) if rank != self._root]
        places = [place for rank in others for place in self._words(rank, _LEFT)]

        def act() -> None:
            for rank in self.left():
                fetch(rank)

        return Unless(self._heap.lines.words, places, [0] * len(places), act)

    def left(self) -> list[int]:
        """On the root, after a barrier: give the ranks that could not reach the array."""
        lines, ranks = self._heap.lines, range(self._heap.size)
        return [
            rank
            for rank in ranks
            if rank != self._root and lines.words[lines.notes(self._base, rank) + _LEFT]
        ]


def reduce(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    """Every rank combines a slice straight into the root's `out`, or into the shadow of `x`.

    Short arrays the root combines alone: one meeting less (4 KiB: 0.6–0.8 of the time on 2 and 4
    ranks, 64 KiB: the same; from 256 KiB on 1.15–1.5 times as long).
    """
    assert call.x is not None and call.op is not None
    parts = blocks(call.x.size, call.size)
    mine = parts[call.rank]
    views = place.views(call.x.size, call.dtype)
    if one_shot(call):
        if call.rank != call.root:
            return [], [[], []]
        assert call.out is not None
        return [], [combine_all(call, views, unowned(call.out)), []]
    inputs, streamed = [x[mine] for x in views], streams(call.nbytes)
    combine_into = partial(fold, call.op, inputs, call.rank, mean=divisor(call), streamed=streamed)
    shadow = place.shadow(call.root, call.x.size, call.dtype)
    aim = RootArray(heap, base, call.root, call.x.size, call.dtype)
    if call.rank == call.root:
        assert call.out is not None
        out = unowned(call.out)

        def fetch(rank: int) -> None:
            out[parts[rank]] = shadow[parts[rank]]

        return aim.announce(call.out), [combine_into([out[mine]]), [aim.collect(fetch)]]

    def combine(target: np.ndarray | None) -> list[Action]:
        return combine_into([(shadow if target is None else target)[mine]])

    return [], [[aim.aimed(combine)], []]


def broadcast(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    """Everyone copies the same amount: the root stores a slice of every other rank's array.

    A single core does not use up the memory's bandwidth, so for 2 ranks this is twice as fast as
    the one copy of the other rank alone.
    """
    assert call.out is not None
    views = place.views(call.out.size, call.dtype)
    cut, copy = blocks(call.out.size, call.size)[-1].start, copier(call.out)
    theirs = slice(0, cut) if call.size > 1 else slice(0, 0)
    if call.rank != call.root:
        return [], [[copy(views[call.rank][theirs], views[call.root][theirs])], []]
    before: list[Action] = []
    if not call.in_place and call.x is not None:
        before.append(store(views[call.rank], unowned(call.x)))
    others = [view for rank, view in enumerate(views) if rank != call.root]
    work = [copy(view[cut:], views[call.root][cut:]) for view in others]
    return before, [list[Action](work), []]


def gather(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    """Every rank stores its part in the root's `out`; the root fetches what is left.

    The parts may lie at different places of one allocation, as in place they do on the root.
    """
    parts, mine = slices_of(call.counts), slices_of(call.counts)[call.rank]
    aim = RootArray(heap, base, call.root, sum(call.counts), call.dtype)
    if call.rank != call.root:
        assert call.x is not None
        x = unowned(call.x)

        def deliver(target: np.ndarray | None) -> list[Action]:
            return [] if target is None else [store(target[mine], x)]

        return aim.announce(call.x), aim.leave(aim.aimed(deliver))
    assert call.x is not None and call.out is not None
    out, counts = unowned(call.out), call.counts  # a call would keep its arrays alive

    def fetch(rank: int) -> None:
        out[parts[rank]] = aim.theirs(rank, counts[rank])

    own: list[Action] = []
    if not call.in_place:
        own.append(store(out[mine], unowned(call.x)))
    return aim.announce(call.out), [own, [aim.collect(fetch)], Phase([], tuple)]


def scatter(call: Call, place: Place, heap: Heap, base: list[int]) -> Body:
    """Every rank fetches its part of the root's `x`; the root stores what is left."""
    parts, mine = slices_of(call.counts), slices_of(call.counts)[call.rank]
    aim = RootArray(heap, base, call.root, sum(call.counts), call.dtype)
    if call.rank != call.root:
        assert call.out is not None
        out = unowned(call.out)

        def fetch(source: np.ndarray | None) -> list[Action]:
            return [] if source is None else [store(out, source[mine])]

        return aim.announce(call.out), aim.leave(aim.aimed(fetch))
    assert call.x is not None and call.out is not None
    x, counts = unowned(call.x), call.counts

    def deal(rank: int) -> None:
        aim.theirs(rank, counts[rank])[...] = x[parts[rank]]

    own: list[Action] = []
    if not call.in_place:
        own.append(store(unowned(call.out), x[mine]))
    return aim.announce(call.x), [own, [aim.collect(deal)], Phase([], tuple)]
