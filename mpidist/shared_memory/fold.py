"""Combining the arrays of several ranks, piece by piece so that each piece stays in the cache.

Used by the kernels of all executors in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..backends.program import Action, store
from ..calls.arrays import address, overlaps
from ..operations import (
    AT_ONCE,
    TREE,
    Op,
    accumulator,
    divide_half,
    divides_first,
    division,
    is_half,
    is_sum,
    kind_of,
    narrow,
    widen,
)
from .compiled import AS_TREE, EXACTLY, IN_ORDER, one_pass, stream
from .exact import combine_exactly

PIECE_BYTES = 256 << 10  # 64 KiB took 1.2 to 1.4 times as long from 256 KiB to 16 MiB, 2 ranks


def fold_in_order(
    op: Op,
    inputs: Sequence[np.ndarray],
    ranks: Sequence[int],
    targets: Sequence[np.ndarray],
    divisor: int,
    scratch: dict[str, np.ndarray] | None = None,
    streamed: bool = False,
) -> list[Action]:
    """Return the actions that combine arrays of several ranks and store the result in all targets.

    The `inputs` are flat, in the order in which they are combined; one of a lower rank than the
    first is the left operand.  The result is divided by `divisor`, unless that is 0.  Sums and
    products in half precision are computed in float32 and rounded once at the end, which is more
    exact than ``direct``, which rounds at each rank.  Exact sums have the same bits in any order.

    `scratch` has scratch arrays by name, for several calls whose actions run one after another: the
    first call must have the longest slice.
    """
    if op.grouping == AT_ONCE and len(inputs) > 1:
        return _exactly(inputs, targets, divisor, {} if scratch is None else scratch, streamed)
    if op.grouping == TREE and len(inputs) > 1:
        scratch = {} if scratch is None else scratch
        return _as_tree(op, inputs, ranks, targets, divisor, scratch, streamed)
    if len(inputs) == 1 and divisor <= 1:
        # One term is its own mean: complex infinities are no quotients.  Mostly it is in place: a
        # sum of 4 MiB on one rank took 55 µs here, and 390 in memory that a GPU reads.
        divisor = 0
        targets = [each for each in targets if address(each) != address(inputs[0])]
        if not targets:
            return []
    # Streaming stores bypass the cache: in compiled code for sums; other results are combined in
    # scratch memory and copied from there, which pays only if there are several targets.
    if is_sum(op):
        summed = one_pass(inputs, targets, divisor, streamed)
        if summed is not None:
            return [summed]
    streamed = streamed and len(targets) > 1
    scratch = {} if scratch is None else scratch
    lower = [peer < ranks[0] for peer in ranks]
    apart = not any(overlaps(targets[0], x) for x in inputs[1:])
    if accumulator(op, inputs[0].dtype) != inputs[0].dtype:
        # Half as long: in float32, in which it is combined, a piece has twice the bytes.
        combine = partial(_combine_in_float32, op, lower, divisor)
        return _by_piece(inputs, targets, combine, PIECE_BYTES // 2, scratch, streamed)
    combine = partial(_combine_in_dtype, op, lower, divisor, apart or streamed)
    return _by_piece(inputs, targets, combine, PIECE_BYTES, scratch, streamed)


def _exactly(
    inputs: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    divisor: int,
    scratch: dict[str, np.ndarray],
    streamed: bool,
) -> list[Action]:
    """Return the actions of a correctly rounded sum, or mean."""
    for past_the_cache in dict.fromkeys((streamed, False)):
        summed = one_pass(inputs, targets, divisor, past_the_cache, grouping=EXACTLY)
        if summed is not None:
            return [summed]

    def combine(pieces: list[np.ndarray], first: np.ndarray, _: object) -> list[Action]:
        return [partial(combine_exactly, pieces, first, divisor)]

    return _by_piece(inputs, targets, combine, PIECE_BYTES, scratch, streamed and len(targets) > 1)


def _as_tree(
    op: Op,
    inputs: Sequence[np.ndarray],
    ranks: Sequence[int],
    targets: Sequence[np.ndarray],
    divisor: int,
    scratch: dict[str, np.ndarray],
    streamed: bool,
) -> list[Action]:
    """Return the actions that combine arrays as the fixed tree over their ranks.

    Every partial result has the arrays' dtype, as those that are sent between ranks.
    """
    terms = [inputs[at] for at in sorted(range(len(inputs)), key=ranks.__getitem__)]
    dtype, few = targets[0].dtype, len(terms) <= 3  # then the tree is their order
    rounds_once = not is_half(dtype) or (len(terms) == 2 and not divisor)
    if is_sum(op) and rounds_once:
        grouping = IN_ORDER if few or kind_of(dtype) == "int" else AS_TREE
        for past_the_cache in dict.fromkeys((streamed, False)):
            summed = one_pass(terms, targets, divisor, past_the_cache, grouping=grouping)
            if summed is not None:
                return [summed]
    combine = partial(_combine_as_tree, op, divisor)
    several = streamed and len(targets) > 1
    return _by_piece(terms, targets, combine, PIECE_BYTES // 2, scratch, several)


Combine = Callable[..., list[Action]]
_NEED_OUT_KEYWORD = (np.maximum, np.minimum)  # others take a positional out, 0.1 µs faster


def _by_piece(
    inputs: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    combine: Combine,
    piece_bytes: int,
    scratch: dict[str, np.ndarray],
    streamed: bool,
) -> list[Action]:
    count, itemsize = inputs[0].size, inputs[0].itemsize
    piece = max(1, piece_bytes // max(itemsize, 1))
    actions: list[Action] = []
    for start in range(0, count, piece):
        part = slice(start, min(start + piece, count))
        first, copy, others = targets[0][part], store, targets[1:]
        if streamed:  # combined in the cache, and from there stored past it in all targets
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
    lower: Sequence[bool],
    divisor: int,
    apart: bool,
    pieces: list[np.ndarray],
    first: np.ndarray,
    scratch: dict[str, np.ndarray],
) -> list[Action]:
    """Return actions that combine the ranks' pieces in their own dtype, with the result in `first`.

    `pieces` are the inputs in order; `lower` says which are left operands.  `apart` means that
    `first` shares no memory with an input but the first, so that it can hold intermediate results.
    """
    function: Callable[..., Any] = op.function if op.builtin else op.combine
    value, others = pieces[0], pieces[1:]
    actions: list[Action] = []
    for n, (other, below) in enumerate(zip(others, lower[1:]), start=1):
        here = apart or n == len(others)
        target = first if here else _scratch_array(scratch, "value", first.size, first.dtype)
        operands = (other, value) if below else (value, other)
        if function in _NEED_OUT_KEYWORD:
            actions.append(partial(function, *operands, out=target))
        else:
            actions.append(partial(function, *operands, target))
        value = target
    if not others and value is not first:
        actions.append(store(first, value))
    if divisor:
        actions.append(division(first, divisor))
    return actions


def _combine_as_tree(
    op: Op,
    divisor: int,
    pieces: list[np.ndarray],
    first: np.ndarray,
    scratch: dict[str, np.ndarray],
) -> list[Action]:
    """Return actions that combine pieces, in the order of ranks, as a tree, into `first`.

    Partial results are in scratch arrays, two for each level: `first` may be an input.
    """
    actions: list[Action] = []
    splits = divides_first(op, first.dtype) and divisor > 0

    def of(start: int, stop: int, name: str) -> np.ndarray:
        """Return an array with the combination of some pieces: scratch, or the one piece."""
        if stop - start == 1 and not splits:
            return pieces[start]
        whole = stop - start == len(pieces)
        into = first if whole else _scratch_array(scratch, name, first.size, first.dtype)
        if stop - start == 1:
            actions.append(partial(divide_half, pieces[start], divisor, into))
            return into
        middle = start + (1 << (stop - start - 1).bit_length() - 1)
        level = (stop - start - 1).bit_length()
        operands = of(start, middle, f"left {level}"), of(middle, stop, f"right {level}")
        actions.append(partial(op.function if op.builtin else op.combine, *operands, out=into))
        return into

    of(0, len(pieces), "")
    if divisor and not splits:
        actions.append(division(first, divisor))
    return actions


def _combine_in_float32(
    op: Op,
    lower: Sequence[bool],
    divisor: int,
    pieces: list[np.ndarray],
    first: np.ndarray,
    scratch: dict[str, np.ndarray],
) -> list[Action]:
    """Return actions that combine half-precision pieces in float32, rounded at the end to `first`.

    `pieces` and `lower` are as for :func:`_combine_in_dtype`.  A mean divides each input first, as
    all algorithms do in half precision.
    """
    value = _scratch_array(scratch, "value", first.size, np.float32)
    other = _scratch_array(scratch, "other", first.size, np.float32)
    actions: list[Action] = [partial(widen, pieces[0], value, divisor)]
    for piece, below in zip(pieces[1:], lower[1:]):
        actions.append(partial(widen, piece, other, divisor))
        operands = (other, value) if below else (value, other)
        actions.append(partial(op.function, *operands, out=value))
    actions.append(partial(narrow, value, first))
    return actions
