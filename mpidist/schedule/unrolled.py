"""Schedules of one rank as lists, and the lengths of their blocks; no memory is bound yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .rounds import Parallel, Schedule, Step, blocks, steps_of

Written = list["tuple[Step, ...] | Strands"]


@dataclass(slots=True)
class Strands:
    """A ``Parallel`` as lists: the rounds of each strand, and the window, which is never None."""

    strands: list[Written]
    window: int


def materialise(schedule: Schedule) -> Written:
    """Return the rounds of a schedule as a list of tuples of steps and of :class:`Strands`.

    So a schedule is generated once and bound to many buffers.
    """
    written: Written = []
    for item in schedule:
        if isinstance(item, Parallel):
            strands = [materialise(s) for s in item.strands]
            written.append(Strands(strands, item.window or max(len(strands), 1)))
        else:
            written.append(steps_of(item))
    return written


@dataclass(frozen=True)
class Lengths:
    """The number of elements of each block on this rank."""

    incoming: tuple[int, ...]  # of the buffer "in"
    outgoing: tuple[int, ...]  # of the buffer "out"

    @classmethod
    def even(cls, n: int, count: int, segments: int) -> Lengths:
        """Return the lengths of `n` elements cut into `count` blocks of `segments` pieces each.

        Each piece counts as a block, in both buffers.
        """
        parts = [s.stop - s.start for s in blocks(n, count)]
        fine = _pieces(parts, segments)
        return cls(fine, fine)

    @classmethod
    def per_rank(
        cls, sends: Sequence[int], receives: Sequence[int], each: int, segments: int
    ) -> Lengths:
        """Return the lengths where each rank has a part of its own length.

        `sends` has the elements of each rank's part in ``in``, `receives` those in ``out``.  A part
        is cut into `each` blocks, and each block into `segments` pieces.
        """
        incoming = _pieces(_pieces(sends, each), segments)
        if sends is receives:
            return cls(incoming, incoming)
        return cls(incoming, _pieces(_pieces(receives, each), segments))


def _pieces(parts: Sequence[int], each: int) -> tuple[int, ...]:
    if each == 1:
        return tuple(parts)
    return tuple(s.stop - s.start for part in parts for s in blocks(part, each))
