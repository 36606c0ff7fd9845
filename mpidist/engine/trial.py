"""Trying out the ways to serve a call: which is the fastest here and now.

What decides between the MPI library, slots and single copies is not in any table: the library, how
far the cores are from each other, and what else runs.  So the first call of a size is served in
each way, on arrays like its own, as a program would::

    write the input, call, read the result, five times | in another way | … | all of it again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

import numpy as np

from ..calls.call import Call
from ..selection.estimates import TRIED_TO
from .programs import Bound
from .repeated import with_own_arrays

_BYTES = 10 << 20  # of all turns of one way together
_LEAST, _MOST = 5, 10  # turns
_ROW = 5  # turns of one way in a row, as in a program: by then both of its slots are in the caches


def example_of(call: Call) -> Call:
    """Return a call like `call` with arrays of its own, of at most 4 MiB: longer ones are alike.

    To try out a gigabyte would take seconds, and memory that the program needs.
    """
    most = TRIED_TO // max(call.dtype.itemsize, 1)
    if call.count <= most or not call.even:
        return with_own_arrays(call)
    part = most // call.size
    counts = (part,) * len(call.counts)
    sizes = {call.count: part * call.size, call.count // call.size: part}
    x, out = (
        None if data is None else np.empty(sizes[data.size], call.dtype)
        for data in (call.x, call.out)
    )
    return with_own_arrays(replace(call, x=x, out=out, counts=counts, out_counts=counts))


def turns_of(nbytes: int) -> int:
    """Return how often each way is tried, for a call of `nbytes`."""
    return min(_MOST, max(_LEAST, _BYTES // max(nbytes, 1))) // _ROW * _ROW


def times_of(call: Call, ways: Mapping[str, Bound], turns: int) -> np.ndarray:
    """Return this rank's seconds of each turn (a row) of each way (a column).

    `ways` are bound to the arrays of `call`.
    """
    x, out = call.x, call.out if call.out is not None else call.x
    words = None if out is None else out.view(np.uint8)[: out.nbytes // 8 * 8].view(np.uint64)
    times = np.zeros((turns, len(ways)))
    for first in range(0, turns, _ROW):
        for number, way in enumerate(ways.values()):
            assert way.within is not None
            for turn in range(first, first + _ROW):
                begun = perf_counter()
                if x is not None:
                    x.fill(turn)
                way.within()
                if words is not None:
                    np.bitwise_or.reduce(words)
                times[turn, number] = perf_counter() - begun
    return times


def least(times: np.ndarray) -> list[float]:
    """Return the seconds of the fastest turn of each way, of ``times[rank, turn, way]``.

    A turn takes as long as its slowest rank.  Other load only adds to it, so of few turns the least
    says most.
    """
    return times.max(axis=0).min(axis=0).tolist()
