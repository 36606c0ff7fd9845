"""Splitting a call into chunks that fit a buffer of host memory: arithmetic, equal on every rank.

Used by the staged executor (:mod:`.staged`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..calls.call import Call

Extent = tuple[int, int]  # start and stop of a range of elements of a flat array


@dataclass(frozen=True)
class Chunk:
    """A part of a call, served as a call of its own.

    The extents are the ranges of this rank's flat input and result, in order; none if it has no
    input or no result.  The counts are those of the chunk's call, as in
    :class:`~mpidist.calls.call.Call`.
    """

    input_extents: tuple[Extent, ...]
    output_extents: tuple[Extent, ...]
    counts: tuple[int, ...] = ()
    out_counts: tuple[int, ...] = ()


def chunks(call: Call, nbytes: int) -> Iterator[Chunk]:
    """Yield the chunks of a call, in which each array has at most `nbytes` bytes.

    A chunk has at least one element, or one of each rank's part, however small `nbytes` is.  An
    alltoall of unequal counts is one chunk: the counts of other ranks are unknown.
    """
    max_elements = max(1, nbytes // max(call.dtype.itemsize, 1))
    if not call.counts:
        yield from _elementwise_chunks(call, max_elements)
        return
    longest = max(*call.counts, *call.out_counts, 0)
    length = longest if call.uneven_alltoall else max(1, max_elements // call.size)
    for first in range(0, max(longest, 1), max(length, 1)):
        counts = _counts_within(call.counts, first, length)
        out_counts = _counts_within(call.out_counts, first, length)
        sent = _extents(call.counts, counts, first)
        received = _extents(call.out_counts, out_counts, first)
        yield Chunk(*_own_extents(call, sent, received), counts, out_counts)


def _elementwise_chunks(call: Call, max_elements: int) -> Iterator[Chunk]:
    """Yield the chunks of arrays that are not divided among the ranks, as in an allreduce."""
    for first in range(0, max(call.count, 1), max_elements):
        extent = ((first, min(first + max_elements, call.count)),)
        yield Chunk(extent if call.x is not None else (), extent if call.out is not None else ())


def _counts_within(counts: Sequence[int], first: int, length: int) -> tuple[int, ...]:
    """Return how many elements of each part a chunk has: at most `length`, from `first` on."""
    return tuple(min(max(n - first, 0), length) for n in counts)


def _extents(counts: Sequence[int], here: Sequence[int], first: int) -> tuple[Extent, ...]:
    starts = [0, *accumulate(counts)]
    return tuple((s + first, s + first + n) if n else (s, s) for s, n in zip(starts, here))


def _own_extents(
    call: Call, sent: tuple[Extent, ...], received: tuple[Extent, ...]
) -> tuple[tuple[Extent, ...], tuple[Extent, ...]]:
    """Return a chunk's ranges of this rank's input, and its ranges of this rank's result.

    `sent` and `received` have a range for each rank's part, in an array of all parts.  An input or
    a result that is this rank's part alone has one range, counted from the start of the part.
    """
    start = sum(call.counts[: call.rank])
    low, high = sent[call.rank]
    mine = ((low - start, high - start),)
    inputs = mine if call.collective in ("allgather", "gather") else sent
    outputs = mine if call.collective in ("reduce_scatter", "scatter") else received
    return inputs if call.x is not None else (), outputs if call.out is not None else ()


def elements(extents: Sequence[Extent]) -> int:
    """Return the total number of elements in extents."""
    return sum(stop - start for start, stop in extents)
