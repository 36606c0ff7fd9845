"""A batch cut into microbatches along its first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import InvalidArgument
from .values import Tree, flatten, select, unflatten


class Microbatches(NamedTuple):
    """A batch split into microbatches; the tensors share memory with the batch."""

    tree: Tree = None  # of the batch, and of each microbatch, see :func:`~.values.flatten`
    tensors: Sequence[list[Any]] = ()  # of each microbatch
    rows: Sequence[int] = ()  # of each microbatch

    def values(self) -> list[Any]:
        """Return a list of the microbatches, each a value with the structure of the batch."""
        return [unflatten(self.tree, tensors) for tensors in self.tensors]


def bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the rows of each of `count` microbatches.

    All have ``rows // count`` rows; the last has the remainder, too.
    """
    each = rows // count
    starts = [k * each for k in range(count)]
    return list(zip(starts, [*starts[1:], rows]))


def cut(value: Any, count: int, rank: int, argument: str) -> Microbatches:
    """Split a batch into `count` microbatches along its first dimension.

    Tensors need the same number of rows, at least `count`; other values go to all microbatches.
    Errors name `rank` and `argument`.
    """
    where = f"rank {rank}: {argument}"
    tree, tensors = flatten(value, where)
    if not tensors:
        raise InvalidArgument(f"{where} has no tensor in it: expected a batch of tensors")
    shapes = [tuple(t.shape) for t in tensors]
    if () in shapes:
        raise InvalidArgument(
            f"{where} has a tensor without dimensions: expected at least one, the rows, which are "
            "cut into microbatches"
        )
    rows = {shape[0] for shape in shapes}
    if len(rows) > 1:
        raise InvalidArgument(f"{where} has tensors of {sorted(rows)} rows: expected one number")
    (total,) = rows
    if total < count:
        raise InvalidArgument(
            f"{where} has {total} rows for num_microbatches={count}: expected at least as many"
        )
    parts = bounds(total, count)
    pieces = [[t[start:stop] for t in tensors] for start, stop in parts]
    return Microbatches(tree, pieces, [stop - start for start, stop in parts])


class OutputForm(NamedTuple):
    """Structure of the output of a microbatch, and the shapes of its tensors."""

    tree: Tree
    shapes: tuple[tuple[int, ...], ...]


def form_of(output: Any) -> OutputForm:
    """Return the structure of an output, and the shapes of its tensors."""
    tree, tensors = flatten(output)
    return OutputForm(tree, tuple([tuple(t.shape) for t in tensors]))


def cut_gradients(grad: Any, outputs: Sequence[OutputForm], rank: int) -> list[list[Any]]:
    """Return for each microbatch the list of its outputs' gradients: tensors, or None for zero.

    `grad` is a list with one gradient for each microbatch, or one for the whole batch, which is
    cut. InvalidArgument if structure or shapes differ from those of the outputs.
    """
    where, count = f"rank {rank}: grad", len(outputs)
    if grad is None:
        raise InvalidArgument(f"{where}=None: expected the gradients of the outputs")
    if not isinstance(grad, list):
        parts = cut(grad, count, rank, "grad")
        needed = sum([form.shapes[0][0] for form in outputs if form.shapes and form.shapes[0]])
        if sum(parts.rows) != needed:
            raise InvalidArgument(
                f"{where} has {sum(parts.rows)} rows: expected {needed}, as the outputs have"
            )
        grad = parts.values()
    if len(grad) != count:
        raise InvalidArgument(
            f"{where} has {len(grad)} entries: expected one for each of num_microbatches={count}"
        )
    found = []
    for k, (output, given) in enumerate(zip(outputs, grad)):
        found.append(select(output.tree, given, f"{where} of microbatch {k}"))
        for tensor, shape in zip(found[-1], output.shapes):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise InvalidArgument(
                    f"{where} of microbatch {k} has shape {tuple(tensor.shape)}: expected "
                    f"{shape}, the shape of its output"
                )
    return found
