"""Cutting a call into chunks that fit a slot: pure arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..calls.call import Call

Extent = tuple[int, int]  # elements from … to below …, of a flat array


@dataclass(frozen=True)
class Chunk:
    """A part of a call, served as a call of its own.

    Attributes
    ----------
    brings, gets : tuple of (int, int)
        Elements of the flat arrays that are the input, in this order, and the result; empty where
        this rank has no part.
    counts, out_counts : tuple of int
        Elements for each rank, or none where the collective has no parts.
    """

    brings: tuple[Extent, ...]
    gets: tuple[Extent, ...]
    counts: tuple[int, ...] = ()
    out_counts: tuple[int, ...] = ()


def chunks(call: Call, nbytes: int) -> Iterator[Chunk]:
    """Cut a call so that the arrays of each chunk have at most `nbytes`, or one element.

    An alltoall of unequal counts stays whole: the counts of other ranks are unknown.
    """
    most = max(1, nbytes // max(call.dtype.itemsize, 1))
    if not call.counts:
        yield from _whole_rows(call, most)
        return
    longest = max(*call.counts, *call.out_counts, 0)
    each = longest if call.uneven_alltoall else max(1, most // call.size)
    for first in range(0, max(longest, 1), max(each, 1)):
        counts = _within(call.counts, first, each)
        out_counts = _within(call.out_counts, first, each)
        sends = _parts(call.counts, counts, first)
        gets = _parts(call.out_counts, out_counts, first)
        yield Chunk(*_own(call, sends, gets), counts, out_counts)


def _whole_rows(call: Call, most: int) -> Iterator[Chunk]:
    """Cut allreduce, reduce and broadcast: every element for itself."""
    for first in range(0, max(call.count, 1), most):
        extent = ((first, min(first + most, call.count)),)
        yield Chunk(extent if call.x is not None else (), extent if call.out is not None else ())


def _within(counts: Sequence[int], first: int, each: int) -> tuple[int, ...]:
    """Return the number of each rank's elements in the range of `each` from `first` on."""
    return tuple(min(max(n - first, 0), each) for n in counts)


def _parts(counts: Sequence[int], here: Sequence[int], first: int) -> tuple[Extent, ...]:
    starts = [0, *accumulate(counts)]
    return tuple((s + first, s + first + n) if n else (s, s) for s, n in zip(starts, here))


def _own(
    call: Call, sends: tuple[Extent, ...], gets: tuple[Extent, ...]
) -> tuple[tuple[Extent, ...], tuple[Extent, ...]]:
    """Return the extents of input and result in this rank's own arrays."""
    start = sum(call.counts[: call.rank])
    low, high = sends[call.rank]
    mine = ((low - start, high - start),)
    brings = mine if call.collective in ("allgather", "gather") else sends
    results = mine if call.collective in ("reduce_scatter", "scatter") else gets
    return brings if call.x is not None else (), results if call.out is not None else ()


def elements(extents: Sequence[Extent]) -> int:
    """Count the elements."""
    return sum(stop - start for start, stop in extents)
