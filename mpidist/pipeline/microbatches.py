"""A batch cut into microbatches along its first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import InvalidArgument
from .values import Tree, flatten, select, unflatten


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


class Output(NamedTuple):
    """How the output of a microbatch was made: its tree, and the shapes of its tensors."""

    tree: Tree
    shapes: tuple[tuple[int, ...], ...]


def shape_of(output: Any) -> Output:
    """Give how an output is made."""
    tree, tensors = flatten(output)
    return Output(tree, tuple([tuple(t.shape) for t in tensors]))


def cut_gradients(grad: Any, outputs: Sequence[Output], rank: int) -> list[list[Any]]:
    """Give the gradients of the outputs of each microbatch, tensors or None in their order.

    Parameters
    ----------
    grad : list, tensor or structure of tensors
        A list of one for each microbatch, or one for the batch, which is cut as it was.
    outputs : sequence of Output
        What they are the gradients of.
    rank : int
        For error messages.

    Raises
    ------
    InvalidArgument
        If it is not made like the outputs.
    """
    where, count = f"rank {rank}: grad", len(outputs)
    if grad is None:
        raise InvalidArgument(f"{where}=None: the outputs' gradients are needed here")
    if not isinstance(grad, list):
        grad, rows = cut(grad, count, rank, "grad")
        needed = sum([shape[0] for output in outputs for shape in output.shapes[:1] if shape])
        if sum(rows) != needed:
            raise InvalidArgument(
                f"{where} has {sum(rows)} rows: allowed are the {needed} of the outputs"
            )
    if len(grad) != count:
        raise InvalidArgument(
            f"{where} has {len(grad)} entries: allowed is one for each of num_microbatches={count}"
        )
    found = []
    for k, (output, given) in enumerate(zip(outputs, grad)):
        found.append(select(output.tree, given, f"{where} of microbatch {k}"))
        for tensor, shape in zip(found[-1], output.shapes):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise InvalidArgument(
                    f"{where} of microbatch {k} has shape {tuple(tensor.shape)}: allowed is that "
                    f"of its output, {shape}"
                )
    return found
