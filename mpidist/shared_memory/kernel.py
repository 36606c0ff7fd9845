"""Parts that kernels share: phases, slices of arrays, views, combining and copying.

A kernel is a collective in shared memory.  Its body is a list of actions before the rank is
announced, and phases of actions; a barrier separates the phases::

    actions before | all ranks arrive | phase 1 | barrier | phase 2 | … | barrier | last phase

They are made by ``engine/one_sided.py``, from schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.program import Action, Program, Round, Side
from ..calls.arrays import address, view_at
from ..calls.call import Call
from ..operations import is_half, is_mean, is_sum
from .barrier import AwaitedRanks, Barrier
from .fold import PIECE_BYTES
from .heap import Heap

_ONE_SHOT_BYTES = {"allreduce": 128 << 10, "reduce": 64 << 10}
"""The largest sizes, in bytes, at which one shot was no slower than two, on 2 and 4 ranks."""


Phase = tuple[list[Action], AwaitedRanks]
"""The actions of a rank after a barrier, and the ranks that it awaits there (None: all)."""


def assemble(
    before: Sequence[Action],
    phases: Sequence[Phase],
    heap: Heap,
    bank: list[int],
    slot: int | None = None,
) -> Program:
    """Return the program of a kernel, with a barrier of `heap` between its phases.

    `bank` is ``Program.bank``: one number, the set of barrier counters and notes in ``heap.lines``
    that a run uses; 0 in blocking calls.  The kernel's actions read it at each run.  `slot` is the
    staging slot that the kernel uses.
    """
    items: list[Round | Side] = []
    for actions, awaits in phases:
        # All ranks have just arrived at the call: the first phase needs no barrier.
        barrier = Barrier(heap.lines, bank, awaits) if items else None
        items.append(Round((), barrier, tuple(actions)))
    return Program(items, bank=bank, before=tuple(before), slot=slot, meets=True)


def one_shot(call: Call) -> bool:
    """Return whether a reduce or an allreduce is faster in one shot than in two.

    In one shot the root, or every rank, combines everything.  In two each rank combines a slice,
    and the slices are collected after another barrier.
    """
    if is_half(call.dtype) and not (is_sum(call.op) and call.dtype.itemsize == 2):
        return False  # numpy needs so long that two shots take 0.5 to 0.9 of the time from 1 KiB on
    readers = call.size - 1 if call.collective == "allreduce" else 1  # of each input, at once
    return call.nbytes * readers <= _ONE_SHOT_BYTES[call.collective]


def divisor(call: Call) -> int:
    """Return the divisor of a call's result: the number of ranks for a mean, else 0."""
    return call.size if is_mean(call.op) else 0


def unowned(x: np.ndarray) -> np.ndarray:
    """Return a view of `x` that does not keep `x` alive."""
    return view_at(address(x), x.size, x.dtype)


def pieces_of(count: int, itemsize: int, nbytes: int = PIECE_BYTES) -> list[slice]:
    """Return slices that cover `count` elements in pieces of `nbytes`, or of one element."""
    piece = max(1, nbytes // max(itemsize, 1))
    return [slice(start, min(start + piece, count)) for start in range(0, count, piece)]


def push(x: np.ndarray, targets: Sequence[tuple[Any, np.ndarray]]) -> list[Action]:
    """Return the actions that copy an array to several targets, piece by piece.

    So each piece is read from memory once, and from the cache for the other targets.  `targets` has
    the function that copies to each.
    """
    if len(targets) < 2:
        return [copy(target, x) for copy, target in targets]
    pieces = pieces_of(x.size, x.itemsize)
    return [copy(target[part], x[part]) for part in pieces for copy, target in targets]
