"""Nested values: flattened to their tensors, described as messages, and rebuilt."""

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
"""What a value is made of, without its tensors: hashable, so that two are quickly compared."""

ONE_TENSOR: Tree = ("tuple", (TENSOR,))
"""That of the gradients of most stages, for which it need not be found out."""


def is_tensor(x: Any) -> bool:
    """Whether `x` is an array of numpy, or a tensor."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def flatten(value: Any, what: str = "the value") -> tuple[Tree, list[Any]]:
    """Give the tree of a value, and its tensors in order.

    Raises
    ------
    InvalidArgument
        If there is anything else in it; the message begins with `what`.
    """
    if is_tensor(value):
        return TENSOR, [value]
    tensors: list[Any] = []
    return _tree(value, tensors, what), tensors


def _tree(value: Any, tensors: list[Any], what: str) -> Tree:
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
        f"{what} has a {type(value).__name__} in it: allowed are tensors, numbers, strings, None, "
        "and tuples, lists and dicts of these"
    )


def build(tree: Tree, leaf: Callable[[], Any], plain: bool = True) -> Any:
    """Give a value of this tree; ``leaf()`` gives its tensors in order.

    Without `plain` there is None in the places of plain values.
    """
    if tree == TENSOR:
        return leaf()
    kind, inside = tree[0], tree[1]
    if kind == "dict":
        return {key: build(t, leaf, plain) for key, t in inside}
    if kind == "plain":
        return tree[2] if plain else None
    made = [build(t, leaf, plain) for t in inside]
    return tuple(made) if kind == "tuple" else made


def unflatten(tree: Tree, tensors: Sequence[Any], plain: bool = True) -> Any:
    """Give a value of this tree with these tensors."""
    if tree == TENSOR:
        return tensors[0]
    rest = iter(tensors)
    return build(tree, lambda: next(rest), plain)


def select(tree: Tree, value: Any, what: str = "the value") -> list[Any]:
    """List what `value`, made like `tree`, has in the places of tensors: tensors or None.

    Raises
    ------
    InvalidArgument
        If it is made otherwise; the message begins with `what`.
    """
    if tree == TENSOR and is_tensor(value):
        return [value]
    return list(_select(tree, value, what))


def _select(tree: Tree, value: Any, what: str) -> Iterator[Any]:
    if tree == TENSOR:
        if value is not None and not is_tensor(value):
            raise InvalidArgument(f"{what} is {_outline(value)}: allowed is a tensor or None")
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
                f"{what} is {_outline(value)}: allowed is a dict of {keys}, or None"
            )
        for key, t in inside:
            yield from _select(t, value[key], f"{what}[{key!r}]")
    else:
        if not isinstance(value, (tuple, list)) or len(value) != len(inside):
            raise InvalidArgument(
                f"{what} is {_outline(value)}: allowed is a {kind} of {len(inside)}, or None"
            )
        for k, (t, v) in enumerate(zip(inside, value)):
            yield from _select(t, v, f"{what}[{k}]")


def _outline(value: Any) -> str:
    """Say what a value is, without its tensors."""
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
    """Give what calls the function of a stage with one value.

    A tuple is its arguments, a dict its keyword arguments.  A Sequential takes a single one: its
    layers hand on whatever they give, and cut anywhere they do so still.
    """
    return function if _takes_one(module) else partial(_spread, function)


def _spread(function: Callable[..., Any], value: Any) -> Any:
    if type(value) is tuple:
        return function(*value)
    return function(**value) if type(value) is dict else function(value)


def _takes_one(module: Any) -> bool:
    """Whether it is a Sequential that goes forward as all of them do."""
    own = getattr(type(module), "forward", None)
    torch = sys.modules.get("torch")
    return own is Sequential.forward or (torch is not None and own is torch.nn.Sequential.forward)


class Form(NamedTuple):
    """All of a value but its tensors' elements; two ranks agree on it once for an edge.

    Attributes
    ----------
    tree
        How tensors lie in the value, see :mod:`.structure`.
    tensors : tuple of (str, tuple of int, bool)
        Each one's dtype (numpy's name), shape, and whether its gradient is asked for.
    rows : int
        Of the batch that this microbatch has, as the first stage counted them.
    """

    tree: Tree
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]
    rows: int

    def describe(self) -> str:
        """Name dtypes and shapes."""
        return ", ".join(f"{dtype}{list(shape)}" for dtype, shape, _ in self.tensors) or "nothing"


class Parcel(NamedTuple):
    """A value on its way.

    Attributes
    ----------
    form : Form
        What it is made of.
    arrays : sequence of ndarray
        One flat array of host memory for each tensor.
    """

    form: Form
    arrays: Sequence[np.ndarray]


class Tensors(Protocol):
    """One library's tensors as parcels need them."""

    def form(self, x: Any) -> tuple[str, tuple[int, ...], bool]:
        """Give dtype, shape and whether the gradient with respect to it is asked for."""

    def array(self, x: Any) -> np.ndarray:
        """Give the elements as a flat array, which shares memory if it can."""

    def own(self, x: Any) -> np.ndarray:
        """Give the elements as a flat array that nobody else has: what `x` is in may be reused."""

    def result(self, x: Any) -> Any:
        """Give an output of the last stage as the user may keep it."""

    def empty(self, dtype: str, count: int) -> np.ndarray:
        """Make a flat array to receive into."""

    def tensor(self, array: np.ndarray, form: tuple[str, tuple[int, ...], bool]) -> Any:
        """Give a tensor on the memory of a flat array."""
