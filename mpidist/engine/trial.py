"""Trying out the ways to serve a call: which is the fastest here and now.

What decides between the MPI library, slots and single copies is not in any table: the library, how
far the cores are from each other, and what else runs.  So the first call of a size is served in
each way, on arrays like its own, as a program would::

    write the input, call, read the result, three times | in another way | …
    those that are not far behind: four times | in another way | … | all of it again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from ..calls.call import Call
from ..selection.estimates import TRIED_TO
from .programs import Bound

FIRST = (3,)  # turns of each way: the first two touch new memory, in one slot and in the other
_FAR_BEHIND = 2.0  # times the fastest: another load does not make up for it
# Seconds of a turn: what interrupts a machine for a millisecond hits all three first turns of a way
# that is as short, in 2 of 120 trials on a quiet one; and more of such turns cost little.
_SHORT = 250e-6


def rows_of(nbytes: int) -> tuple[int, ...]:
    """Return how many turns in a row each way gets after its first ones, again and again.

    As in a program, one way is called several times: by then both of its slots are in the caches.
    """
    return (4, 4) if nbytes <= 1 << 20 else (3,)


def near(times: Mapping[str, float]) -> list[str]:
    """Return the ways worth more turns, in their order; none if one is far ahead of all others."""
    limit = max(_FAR_BEHIND * min(times.values(), default=0.0), _SHORT)
    found = [name for name, seconds in times.items() if seconds <= limit]
    return found if len(found) > 1 else []


def shortened(call: Call) -> Call:
    """Return a call like `call`, of at most TRIED_TO bytes; shorter arrays have no memory."""
    if call.nbytes <= TRIED_TO:
        return call

    def fewer(count: int) -> int:
        return count * TRIED_TO // call.nbytes

    counts, out_counts = tuple(map(fewer, call.counts)), tuple(map(fewer, call.out_counts))
    whole = sum(counts) if counts else fewer(call.count)

    def like(data: np.ndarray | None) -> np.ndarray | None:
        if data is None:
            return None
        size = whole if data.size == call.count else counts[call.rank]
        return np.broadcast_to(np.zeros((), call.dtype), (size,))

    return replace(call, x=like(call.x), out=like(call.out), counts=counts, out_counts=out_counts)


def times_of(call: Call, ways: Mapping[str, Bound], rows: Sequence[int]) -> np.ndarray:
    """Return this rank's seconds of each turn (a row) of each way (a column).

    `ways` are bound to the arrays of `call`; `rows` are numbers of turns in a row.  The first turn
    of each is not among the times: it writes what another way has left in the caches, which takes
    the less the fewer of its lines others have read.
    """
    # Zeros are a value of every dtype, also where no number is: of "V8".  They are copied as in
    # `mpidist bench`: to fill memory with a byte needs less time where others have read its lines.
    written, read = _words(call.x), _words(call.out if call.out is not None else call.x)
    zeros = np.zeros_like(written)
    times: list[list[float]] = [[] for _ in ways]
    for row in rows:
        for way, seconds in zip(ways.values(), times):
            assert way.within is not None
            for turn in range(row):
                begun = perf_counter()
                np.copyto(written, zeros)
                way.within()
                np.bitwise_or.reduce(read)
                if turn:
                    seconds.append(perf_counter() - begun)
    return np.array(times).T


def _words(x: np.ndarray | None) -> np.ndarray:
    """Return an array as words of 8 bytes, without the rest; none of an array that is not there."""
    data = np.empty(0, np.uint8) if x is None else x.view(np.uint8)
    return data[: data.nbytes // 8 * 8].view(np.uint64)


def least(times: np.ndarray) -> list[float]:
    """Return the seconds of the fastest turn of each way, of ``times[rank, turn, way]``.

    A turn takes as long as its slowest rank.  Other load only adds to it, so of few turns the least
    says most.
    """
    return times.max(axis=0).min(axis=0).tolist()
