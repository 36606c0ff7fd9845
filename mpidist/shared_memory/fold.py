"""Combining the arrays of several ranks, piece by piece so that each piece stays in the cache.

Used by the kernels of all executors in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..algorithms.relabel import outward
from ..backends.program import Action, store
from ..calls.arrays import overlaps
from ..operations import Op, accumulator, division, narrow, widen
from .compiled import one_pass, stream

PIECE_BYTES = 256 << 10  # 64 KiB took 1.2 to 1.4 times as long from 256 KiB to 16 MiB, 2 ranks


def fold(
    op: Op,
    inputs: Sequence[np.ndarray],
    rank: int,
    targets: Sequence[np.ndarray],
    divisor: int,
    scratch: dict[str, np.ndarray] | None = None,
    streamed: bool = False,
) -> list[Action]:
    """Return the actions that combine a slice of all ranks' arrays and store it in all targets.

    Parameters
    ----------
    op : Op
        The operation.
    inputs : sequence of ndarray
        The slice of every rank, flat, by rank.
    rank : int
        Owner of the slice.  Its input is combined first with those of the ranks below it, from
        ``rank - 1`` down to 0, then with those above it, as in the ``direct`` schedule, so that the
        bits are the same.
    targets : sequence of ndarray
        Arrays for the result; the combination writes to the first, which is copied to the others.
    divisor : int
        Divisor of the result; 0 for no division.
    scratch : dict, optional
        Scratch arrays by name, to be passed to several calls whose actions run one after another;
        the first call must have the longest slice.  By default new ones.
    streamed : bool, optional
        Whether to use streaming stores, which bypass the cache.  They are used for sums in one
        pass; other results are combined in scratch memory and copied, if there are several targets.

    Returns
    -------
    list of callable
        Actions to be called in order.  Sums and products in half precision are computed in float32
        and rounded once at the end, which is more exact than ``direct``, which rounds at each rank.
    """
    if op.builtin and op.name in ("sum", "mean"):
        order = [inputs[peer] for peer in (rank, *outward(rank, len(inputs)))]
        summed = one_pass(order, targets, divisor, streamed)
        if summed is not None:
            return [summed]
    streamed = streamed and len(targets) > 1
    scratch = {} if scratch is None else scratch
    others = (x for peer, x in enumerate(inputs) if peer != rank)
    apart = not any(overlaps(targets[0], x) for x in others)
    if accumulator(op, inputs[rank].dtype) != inputs[rank].dtype:
        combine = partial(_combine_in_float32, op, rank, divisor)
        return _by_piece(inputs, rank, targets, combine, PIECE_BYTES // 2, scratch, streamed)
    combine = partial(_combine_in_dtype, op, rank, divisor, apart or streamed)
    return _by_piece(inputs, rank, targets, combine, PIECE_BYTES, scratch, streamed)


Combine = Callable[..., list[Action]]
_NEED_OUT_KEYWORD = (np.maximum, np.minimum)  # others take a positional out, 0.1 µs faster


def _by_piece(
    inputs: Sequence[np.ndarray],
    rank: int,
    targets: Sequence[np.ndarray],
    combine: Combine,
    piece_bytes: int,
    scratch: dict[str, np.ndarray],
    streamed: bool,
) -> list[Action]:
    count, itemsize = inputs[rank].size, inputs[rank].itemsize
    piece = max(1, piece_bytes // max(itemsize, 1))
    actions: list[Action] = []
    for start in range(0, count, piece):
        part = slice(start, min(start + piece, count))
        first, copy, others = targets[0][part], store, targets[1:]
        if streamed:
            first = _scratch_array(scratch, "result", first.size, first.dtype)
            copy, others = stream, targets
        actions.extend(combine([x[part] for x in inputs], first, scratch))
        actions.extend(copy(other[part], first) for other in others)
    return actions


def _scratch_array(scratch: dict[str, np.ndarray], name: str, count: int, dtype: Any) -> np.ndarray:
    """Return the scratch array `name`, which all pieces reuse: the first piece is the longest."""
    if name not in scratch:
        scratch[name] = np.empty(count, dtype)
    return scratch[name][:count]


def _combine_in_dtype(
    op: Op,
    rank: int,
    divisor: int,
    apart: bool,
    pieces: list[np.ndarray],
    first: np.ndarray,
    scratch: dict[str, np.ndarray],
) -> list[Action]:
    """Return actions that combine the ranks' pieces in their own dtype, with the result in `first`.

    `pieces` are the inputs, by rank; `rank` is the owner, as in :func:`fold`.  `apart` means that
    `first` shares no memory with another rank's input, so that it can hold intermediate results.
    """
    function: Callable[..., Any] = op.function if op.builtin else op.combine
    value, order = pieces[rank], outward(rank, len(pieces))
    actions: list[Action] = []
    for left, peer in zip(range(len(order) - 1, -1, -1), order):
        here = apart or left == 0
        target = first if here else _scratch_array(scratch, "value", first.size, first.dtype)
        operands = (pieces[peer], value) if peer < rank else (value, pieces[peer])
        if function in _NEED_OUT_KEYWORD:
            actions.append(partial(function, *operands, out=target))
        else:
            actions.append(partial(function, *operands, target))
        value = target
    if not order and value is not first:
        actions.append(store(first, value))
    if divisor:
        actions.append(division(first, divisor))
    return actions


def _combine_in_float32(
    op: Op,
    rank: int,
    divisor: int,
    pieces: list[np.ndarray],
    first: np.ndarray,
    scratch: dict[str, np.ndarray],
) -> list[Action]:
    """Return actions that combine half-precision pieces in float32, rounded at the end to `first`.

    `pieces` are the inputs, by rank; `rank` is the owner, as in :func:`fold`.  A mean divides each
    input first, as all algorithms do in half precision.
    """
    value = _scratch_array(scratch, "value", first.size, np.float32)
    other = _scratch_array(scratch, "other", first.size, np.float32)
    actions: list[Action] = [partial(widen, pieces[rank], value, divisor)]
    for peer in outward(rank, len(pieces)):
        actions.append(partial(widen, pieces[peer], other, divisor))
        operands = (other, value) if peer < rank else (value, other)
        actions.append(partial(op.function, *operands, out=value))
    actions.append(partial(narrow, value, first))
    return actions
