"""Combining the arrays of several ranks piece by piece, each piece while it is in the cache."""

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
    mean: int,
    kept: dict[str, np.ndarray] | None = None,
    streamed: bool = False,
) -> list[Action]:
    """Combine the same slice of all ranks' arrays and store it in all targets.

    Parameters
    ----------
    op : Op
        The operation.
    inputs : sequence of ndarray
        The slice of every rank, flat, by rank.
    rank : int
        Who owns the slice: its contribution comes first, then those below from near to far, then
        those above, as in the ``direct`` schedule, so the bits are the same.
    targets : sequence of ndarray
        Where the result goes; the first is written by the combination itself.
    mean : int
        What the result is divided by; 0 for nothing.
    kept : dict, optional
        Scratch memory, of slices that are combined one after another, the longest first.
    streamed : bool, optional
        Store the result in the targets round the cache, if they are several: what is not summed in
        one pass is combined in scratch memory first.

    Returns
    -------
    list of callable
        To be called in order.  Sums and products of half precision are taken in float32 and
        rounded once, in the end; this is more exact than ``direct``, which rounds at every rank.
    """
    if op.builtin and op.name in ("sum", "mean"):
        order = [inputs[peer] for peer in (rank, *outward(rank, len(inputs)))]
        summed = one_pass(order, targets, mean, streamed)
        if summed is not None:
            return [summed]
    streamed = streamed and len(targets) > 1
    kept = {} if kept is None else kept
    others = (x for peer, x in enumerate(inputs) if peer != rank)
    apart = not any(overlaps(targets[0], x) for x in others)
    if accumulator(op, inputs[rank].dtype) != inputs[rank].dtype:
        combine = partial(_wide, op, rank, mean)
        return _by_piece(inputs, rank, targets, combine, PIECE_BYTES // 2, kept, streamed)
    combine = partial(_narrow, op, rank, mean, apart or streamed)
    return _by_piece(inputs, rank, targets, combine, PIECE_BYTES, kept, streamed)


Combine = Callable[..., list[Action]]
_BY_NAME = (np.maximum, np.minimum)  # numpy wants their result named; positions are 0.1 µs faster


def _by_piece(
    inputs: Sequence[np.ndarray],
    rank: int,
    targets: Sequence[np.ndarray],
    combine: Combine,
    piece_bytes: int,
    kept: dict[str, np.ndarray],
    streamed: bool,
) -> list[Action]:
    count, itemsize = inputs[rank].size, inputs[rank].itemsize
    piece = max(1, piece_bytes // max(itemsize, 1))
    actions: list[Action] = []
    for start in range(0, count, piece):
        part = slice(start, min(start + piece, count))
        first, copy, others = targets[0][part], store, targets[1:]
        if streamed:
            first = _scratch(kept, "result", first.size, first.dtype)
            copy, others = stream, targets
        actions.extend(combine([x[part] for x in inputs], first, kept))
        actions.extend(copy(other[part], first) for other in others)
    return actions


def _scratch(kept: dict[str, np.ndarray], name: str, count: int, dtype: Any) -> np.ndarray:
    """Give scratch memory that all pieces use in turn; the first piece is the longest."""
    if name not in kept:
        kept[name] = np.empty(count, dtype)
    return kept[name][:count]


def _narrow(
    op: Op,
    rank: int,
    mean: int,
    apart: bool,
    pieces: list[np.ndarray],
    first: np.ndarray,
    kept: dict[str, np.ndarray],
) -> list[Action]:
    """Combine in the dtype of the data; in the target itself, unless it is another's input."""
    function: Callable[..., Any] = op.function if op.builtin else op.combine
    value, order = pieces[rank], outward(rank, len(pieces))
    actions: list[Action] = []
    for left, peer in zip(range(len(order) - 1, -1, -1), order):
        here = apart or left == 0
        target = first if here else _scratch(kept, "value", first.size, first.dtype)
        operands = (pieces[peer], value) if peer < rank else (value, pieces[peer])
        if function in _BY_NAME:
            actions.append(partial(function, *operands, out=target))
        else:
            actions.append(partial(function, *operands, target))
        value = target
    if not order and value is not first:
        actions.append(store(first, value))
    if mean:
        actions.append(division(first, mean))
    return actions


def _wide(
    op: Op,
    rank: int,
    mean: int,
    pieces: list[np.ndarray],
    first: np.ndarray,
    kept: dict[str, np.ndarray],
) -> list[Action]:
    """Combine in float32, and round the result; a mean divides first, as on every path."""
    value = _scratch(kept, "value", first.size, np.float32)
    other = _scratch(kept, "other", first.size, np.float32)
    actions: list[Action] = [partial(widen, pieces[rank], value, mean)]
    for peer in outward(rank, len(pieces)):
        actions.append(partial(widen, pieces[peer], other, mean))
        operands = (other, value) if peer < rank else (value, other)
        actions.append(partial(op.function, *operands, out=value))
    actions.append(partial(narrow, value, first))
    return actions
