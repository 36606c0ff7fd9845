"""What the kernels have in common: the parts of an array, views of it, copies to several places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..backends.program import Action, store
from ..calls.arrays import address, view_at
from ..calls.call import Call
from ..operations import is_half, is_mean
from ..schedule.rounds import blocks
from .compiled import stream, streams
from .fold import PIECE_BYTES, fold

_ONE_SHOT_BYTES = {"allreduce": 128 << 10, "reduce": 64 << 10}
_OF_HALVES = {"allreduce": 1 << 10, "reduce": 2 << 10}
_OF_BFLOAT16 = {"allreduce": 1 << 10, "reduce": 64 << 10}
"""Up to how many bytes one shot was no slower, on 2 and 4 ranks.

Numpy converts float16 and float8 slowly, in 10 and 20 times the time of adding float32: to combine
everything on each rank took 1.3 of the time at 2 KiB, 1.7 at 128 KiB; bfloat16, whose conversion
takes half the time of adding, 1.05 and 1.66.
"""

Awaited = Callable[[], Sequence[int]]


class Phase(NamedTuple):
    """What a rank does from one meeting on: not all of them are waited for in every one.

    Attributes
    ----------
    actions : list of callable
        What it does.
    awaits : callable, optional
        Gives the ranks that must have come first; by default all.
    """

    actions: list[Action]
    awaits: Awaited | None = None


Body = tuple[list[Action], Sequence[Phase | list[Action]]]
"""What is done before the rank is announced; the phases."""


def one_shot(call: Call) -> bool:
    """Tell whether one meeting less pays, with one rank, or each, combining everything."""
    limits = _ONE_SHOT_BYTES
    if is_half(call.dtype):
        limits = _OF_BFLOAT16 if call.dtype.name == "bfloat16" else _OF_HALVES
    others = call.size - 1 if call.collective == "allreduce" else 1  # that all fetch at once
    return call.nbytes * others <= limits[call.collective]


def divisor(call: Call) -> int:
    """Return the divisor of a mean, 0 for other operations; half precision is divided first."""
    return call.size if is_mean(call.op) else 0


def combine(
    call: Call, inputs: Sequence[np.ndarray], owner: int, part: slice, target: np.ndarray
) -> list[Action]:
    """Combine a part of the inputs of all ranks in its owner's order."""
    assert call.op is not None
    return fold(call.op, [view[part] for view in inputs], owner, [target], divisor(call))


def combine_all(call: Call, inputs: Sequence[np.ndarray], out: np.ndarray) -> list[Action]:
    """Combine everything, each slice in its owner's order; of two operands both are the same."""
    parts = [slice(0, out.size)] if call.size <= 2 else blocks(out.size, call.size)
    actions: list[Action] = []
    for owner, part in enumerate(parts):
        actions += combine(call, inputs, owner, part, out[part])
    return actions


def slices_of(counts: Sequence[int]) -> list[slice]:
    """Give the part of each rank in an array that has all parts one after another."""
    stops = list(accumulate(counts))
    return [slice(stop - count, stop) for stop, count in zip(stops, counts)]


def cut(count: int, itemsize: int, nbytes: int = PIECE_BYTES) -> list[slice]:
    """Give pieces of so many bytes of an array; one where there are no elements."""
    piece = max(1, nbytes // max(itemsize, 1))
    return [slice(start, min(start + piece, count)) for start in range(0, max(count, 1), piece)]


def unowned(x: np.ndarray) -> np.ndarray:
    """Give a view that does not keep the user's array alive."""
    return view_at(address(x), x.size, x.dtype)


def copier(result: np.ndarray) -> Callable[[np.ndarray, np.ndarray], Action]:
    """Give what makes the copies into parts of this result: round the cache if it is long."""
    return stream if streams(result.nbytes) else store


def push(x: np.ndarray, targets: Sequence[np.ndarray], copy: Any = store) -> list[Action]:
    """Store an array in several places, piece by piece: it is read from memory once."""
    if len(targets) < 2:
        return [copy(target, x) for target in targets]
    pieces = cut(x.size, x.itemsize)
    return [copy(target[part], x[part]) for part in pieces for target in targets]
