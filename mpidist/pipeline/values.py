"""Nested values: flattened to their tensors, described for messages, and rebuilt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import InvalidArgument
from ..nn import Sequential

TENSOR = "tensor"
PLAIN = (bool, int, float, complex, str, bytes, type(None))

Tree = Any
"""The structure of a nested value, without its tensors: hashable, so that two compare quickly.

::

    value   {"x": tensor, "mask": [tensor, 3]}
    tree    ("dict", (("x", "tensor"), ("mask", ("list", ("tensor", ("plain", "int", 3))))))
"""

ONE_TENSOR: Tree = ("tuple", (TENSOR,))
"""The tree of most stages' gradients, a tuple of one tensor."""


def is_tensor(x: Any) -> bool:
    """Return whether `x` is an array or a tensor of any library: it has a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def flatten(value: Any, what: str = "the value") -> tuple[Tree, list[Any]]:
    """Return the tree of a value (its structure without tensors), and its tensors in order.

    InvalidArgument, which begins with `what`, if the value has anything in it but tensors, numbers,
    strings, None, and tuples, lists and dicts of these.
    """
    if is_tensor(value):
        return TENSOR, [value]
    tensors: list[Any] = []
    return _tree(value, tensors, what), tensors


def _tree(value: Any, tensors: list[Any], what: str) -> Tree:
    """Return the tree of a value, and append its tensors to `tensors`, in the order of the tree."""
    if is_tensor(value):
        tensors.append(value)
        return TENSOR
    if type(value) in (tuple, list):
        return type(value).__name__, tuple([_tree(v, tensors, what) for v in value])
    if type(value) is dict:
        return "dict", tuple([(key, _tree(v, tensors, what)) for key, v in value.items()])
    if isinstance(value, PLAIN):
        return "plain", type(value).__name__, value
    raise InvalidArgument(
        f"{what} has a {type(value).__name__} in it: expected tensors, numbers, strings, None, "
        "and tuples, lists and dicts of these"
    )


def unflatten(tree: Tree, tensors: Sequence[Any], plain: bool = True) -> Any:
    """Rebuild a value from its tree and its tensors, the results of :func:`flatten`.

    If `plain` is False, the numbers and strings in it become None, as in a structure of gradients.
    """
    if tree == TENSOR:
        return tensors[0]
    return _build(tree, iter(tensors), plain)


def _build(tree: Tree, tensors: Iterator[Any], plain: bool) -> Any:
    """Return the value of a tree, with the next of the tensors wherever it has one."""
    if tree == TENSOR:
        return next(tensors)
    kind, inside = tree[0], tree[1]
    if kind == "dict":
        return {key: _build(t, tensors, plain) for key, t in inside}
    if kind == "plain":
        return tree[2] if plain else None
    items = [_build(t, tensors, plain) for t in inside]
    return tuple(items) if kind == "tuple" else items


def select(tree: Tree, value: Any, what: str = "the value") -> list[Any]:
    """List the tensor, or None, that `value` has in place of each tensor of `tree`.

    InvalidArgument, which begins with `what`, if `value` has another structure.
    """
    if tree == TENSOR and is_tensor(value):
        return [value]
    return list(_select(tree, value, what))


def _select(tree: Tree, value: Any, what: str) -> Iterator[Any]:
    """Yield what :func:`select` lists; a None in `value` stands for all tensors below it."""
    if tree == TENSOR:
        if value is not None and not is_tensor(value):
            raise InvalidArgument(f"{what} is {_outline(value)}: expected a tensor or None")
        yield value
        return
    kind, inside = tree[0], tree[1]
    if kind == "plain":
        return
    if value is None:
        yield from [None] * _count(tree)
    elif kind == "dict":
        keys = [key for key, _ in inside]
        if not isinstance(value, dict) or set(value) != set(keys):
            raise InvalidArgument(
                f"{what} is {_outline(value)}: expected a dict of {keys}, or None"
            )
        for key, t in inside:
            yield from _select(t, value[key], f"{what}[{key!r}]")
    else:
        if not isinstance(value, (tuple, list)) or len(value) != len(inside):
            raise InvalidArgument(
                f"{what} is {_outline(value)}: expected a {kind} of {len(inside)}, or None"
            )
        for k, (t, v) in enumerate(zip(inside, value)):
            yield from _select(t, v, f"{what}[{k}]")


def _outline(value: Any) -> str:
    """Return text that describes the outermost container of a value, for errors."""
    if isinstance(value, dict):
        return f"a dict of {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _count(tree: Tree) -> int:
    if tree == TENSOR:
        return 1
    if tree[0] == "plain":
        return 0
    return sum(_count(t[1] if tree[0] == "dict" else t) for t in tree[1])


def caller_of(function: Callable[..., Any], module: Any) -> Callable[[Any], Any]:
    """Return a function of one value, which calls `function`, the forward of `module`, with it.

    A tuple becomes the arguments, a dict the keyword arguments.  A Sequential gets any value as
    its single argument, so that it works alike wherever the model is cut.
    """
    return function if _takes_one(module) else partial(_spread, function)


def _spread(function: Callable[..., Any], value: Any) -> Any:
    if type(value) is tuple:
        return function(*value)
    return function(**value) if type(value) is dict else function(value)


def _takes_one(module: Any) -> bool:
    """Return whether `module` is a Sequential that does not override forward."""
    own = getattr(type(module), "forward", None)
    torch = sys.modules.get("torch")
    return own is Sequential.forward or (torch is not None and own is torch.nn.Sequential.forward)


TensorForm = tuple[str, tuple[int, ...], bool]
"""Dtype (numpy's name), shape, and whether the gradient of a tensor is wanted."""


class Metadata(NamedTuple):
    """The description of a value without its elements; the header of a message has it."""

    tree: Tree  # see :func:`flatten`
    tensors: tuple[TensorForm, ...]
    rows: int  # of the microbatch, as the first stage counted them; 0 with gradients


class TensorMessage(NamedTuple):
    """A value in the form in which one stage sends it to another."""

    metadata: Metadata
    # One flat array for each tensor: on the host, or on a GPU if MPI takes its addresses.
    arrays: Sequence[np.ndarray]


class Tensors(Protocol):
    """Conversion between the tensors of one library and the arrays of messages."""

    def form(self, x: Any) -> TensorForm:
        """Return dtype name (marked if on a GPU), shape, and whether `x` needs a gradient."""

    def array(self, x: Any) -> np.ndarray:
        """Return the elements as a flat array to send, which shares memory where possible."""

    def own(self, x: Any) -> np.ndarray:
        """Return a flat copy of the elements to send: a layer may reuse the memory of `x`."""

    def result(self, x: Any) -> Any:
        """Return an output of the last stage as a tensor that the user may keep."""

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Return an uninitialised flat array of `count` elements, to receive into."""

    def tensor(self, array: np.ndarray, form: TensorForm) -> Any:
        """Return a received flat array as a tensor in the shape of `form`, on the right device."""
