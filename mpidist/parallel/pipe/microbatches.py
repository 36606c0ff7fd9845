"""A batch cut into microbatches along its first dimension."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidArgument
from .structure import flatten, unflatten


def bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Give where each of `count` microbatches begins and ends; the last takes the remainder."""
    each = rows // count
    starts = [k * each for k in range(count)]
    return list(zip(starts, [*starts[1:], rows]))


def cut(value: Any, count: int, rank: int, argument: str) -> tuple[list[Any], list[int]]:
    """Cut a batch.

    Parameters
    ----------
    value : tensor or structure of tensors
        Each of at least one dimension, with equally many rows; other values go to all microbatches.
    count : int
        How many microbatches.
    rank, argument
        For error messages.

    Returns
    -------
    list, list of int
        The microbatches, whose tensors share memory with `value`, and their numbers of rows.

    Raises
    ------
    InvalidArgument
        If there are fewer rows than microbatches, or tensors that cannot be cut alike.
    """
    where = f"rank {rank}: {argument}"
    tree, tensors = flatten(value, where)
    if not tensors:
        raise InvalidArgument(f"{where} has no tensor in it: allowed are batches of tensors")
    shapes = [tuple(t.shape) for t in tensors]
    if () in shapes:
        raise InvalidArgument(
            f"{where} has a tensor without dimensions: allowed are tensors of at least one, "
            "which is cut into microbatches"
        )
    rows = {shape[0] for shape in shapes}
    if len(rows) > 1:
        raise InvalidArgument(f"{where} has tensors of {sorted(rows)} rows: allowed is one number")
    (total,) = rows
    if total < count:
        raise InvalidArgument(
            f"{where} has {total} rows for num_microbatches={count}: allowed are at least as many"
        )
    parts = bounds(total, count)
    pieces = [unflatten(tree, [t[start:stop] for t in tensors]) for start, stop in parts]
    return pieces, [stop - start for start, stop in parts]
