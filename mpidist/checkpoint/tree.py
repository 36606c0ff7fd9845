"""A state as a tree of JSON, with its arrays beside it: made, read, joined and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.recognise import on_host
from ..errors import InvalidArgument, MpidistError
from ..foreign import shown, typed
from ..frameworks.base import ADAPTERS, framework_of, library
from .state import Divided, MayDiffer, Part

PLAIN = (bool, int, float, str, type(None))
DEEPEST_STATE = 50  # a dict is three levels of JSON, of which read_json allows 200


@dataclass(frozen=True)
class Leaf:
    """An array in a state, or a rank's slice of one."""

    flat: np.ndarray  # elements of the array or of the slice
    start: int  # of the slice in the flattened array; 0 for a whole array
    shape: tuple[int, ...]  # of the whole array
    whole: bool  # whether it is an array, not a slice of one
    may_differ: bool = False  # whether ranks may have different values (:class:`MayDiffer`)


def flatten(value: Any, path: str, leaves: dict[str, Leaf], depth: int = 0) -> Any:
    """Return a state as a JSON tree; its arrays are added to `leaves` by path.

    `path` is the name of the state; the paths in it append the keys, such as "model/0.weight".
    InvalidArgument, with the path, for a value that is neither an array nor a number, string, None,
    list, tuple or dict; for an array of records, or one with values that its memory alone does not
    give (masked, or a tensor subclass that wraps others); and for one nested too deep.
    """
    if isinstance(value, PLAIN):
        return value
    if depth > DEEPEST_STATE:
        raise InvalidArgument(f"{path:.60}… is nested more than {DEEPEST_STATE} levels deep")
    depth += 1
    if isinstance(value, Mapping):
        items = [[key, flatten(v, f"{path}/{key}", leaves, depth)] for key, v in value.items()]
        if any(not isinstance(key, (str, int)) for key, _ in items):
            raise InvalidArgument(f"{path} has keys that are neither strings nor whole numbers")
        return {"divided" if isinstance(value, Divided) else "dict": items}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [flatten(v, f"{path}/{i}", leaves, depth) for i, v in enumerate(value)]}
    may_differ = isinstance(value, MayDiffer)
    value = value.array if may_differ else value
    given = value.array if isinstance(value, Part) else value
    name = library(given) or "numpy"
    try:
        array = framework_of(given).as_array(on_host(given))
    except MpidistError as error:
        raise InvalidArgument(f"{path} is {error}") from None
    if not isinstance(array, (np.ndarray, np.generic)) or array.dtype.hasobject:
        raise InvalidArgument(
            f"{path} has type {type(value).__name__}: expected arrays of numpy or torch, numbers, "
            "strings, None, lists, tuples and dicts"
        )
    if array.dtype.names:
        raise InvalidArgument(
            f"{path} has dtype {array.dtype}: save the fields as a dict of arrays"
        )
    if path in leaves:
        raise InvalidArgument(f"{path} is the path of two arrays: rename a key")
    scalar = isinstance(array, np.generic)
    whole = not isinstance(value, Part)
    start, shape = (0, np.shape(array)) if whole else (value.start, value.shape)
    flat = np.ascontiguousarray(array).reshape(-1)
    leaves[path] = Leaf(flat, start, shape, whole, may_differ)
    return {"array": path, "library": "scalar" if scalar else name}


def unflatten(tree: Any, give: Callable[[str, str], Any]) -> Any:
    """Return the state that a JSON tree describes: the inverse of :func:`flatten`.

    ``give(path, library)`` returns the array at a path, in that library.
    """
    if not isinstance(tree, dict):
        return tree
    if "dict" in tree:
        return {key: unflatten(v, give) for key, v in tree["dict"]}
    for kind, make in (("tuple", tuple), ("list", list)):
        if kind in tree:
            return make(unflatten(v, give) for v in tree[kind])
    return give(tree["array"], tree["library"])


def merge(trees: Mapping[int, Any], path: str, unlike: Callable[[str, Sequence[int]], None]) -> Any:
    """Return one tree for the trees of all ranks, which must be equal except in a `Divided`.

    The keys of a :class:`Divided` are joined; entries under the same key must be equal.
    ``unlike(path, ranks)`` is called for a path at which `ranks` differ from the lowest rank, or
    lack a key of an ordinary dict.
    """
    lowest = min(trees)
    first = trees[lowest]
    kinds = {rank: _kind(tree) for rank, tree in trees.items()}
    others = [rank for rank, kind in kinds.items() if kind != kinds[lowest]]
    if others:
        unlike(path, others)
        return first
    if kinds[lowest][0] not in ("dict", "divided", "list", "tuple"):
        return first
    name = kinds[lowest][0]
    if name in ("list", "tuple"):
        # equal lengths are part of the kind
        each = [{r: tree[name][k] for r, tree in trees.items()} for k in range(len(first[name]))]
        return {name: [merge(entry, f"{path}/{k}", unlike) for k, entry in enumerate(each)]}
    # By key, what each rank has under it: of a dict all ranks must have all keys, of a Divided the
    # keys of all ranks are joined.
    found: dict[Any, dict[int, Any]] = {}
    for rank, tree in sorted(trees.items()):
        for key, value in tree[name]:
            found.setdefault(key, {})[rank] = value
    if name == "dict":
        for key, held in found.items():
            if len(held) < len(trees):
                unlike(f"{path}/{key}", sorted(set(trees) - set(held)))
    return {"dict": [[key, merge(held, f"{path}/{key}", unlike)] for key, held in found.items()]}


def is_divided(tree: Any) -> bool:
    """Return whether there is a :class:`Divided` in a JSON tree."""
    kind, *_ = _kind(tree)
    if kind == "divided":
        return True
    if kind == "dict":
        return any(is_divided(value) for _, value in tree[kind])
    return kind in ("list", "tuple") and any(map(is_divided, tree[kind]))


def _kind(tree: Any) -> tuple[Any, ...]:
    """Return what must be equal on all ranks at the top of a JSON tree.

    ("dict",) or ("divided",); ("list", length) or ("tuple", length); else ("value", JSON text).
    """
    if isinstance(tree, dict):
        for name in ("dict", "divided"):
            if name in tree:
                return (name,)
        for name in ("list", "tuple"):
            if name in tree:
                return name, len(tree[name])
    return "value", json.dumps(tree)  # tells True from 1, -0.0 from 0.0, and has NaN equal NaN


def check_tree(tree: Any, path: str, arrays: Mapping[str, Any]) -> None:
    """Raise TypeError unless a JSON tree has the form that :func:`flatten` returns."""
    if isinstance(tree, PLAIN):
        return
    (kind, inner), *more = tree.items() if isinstance(tree, dict) and tree else ((None, None),)
    if kind == "dict" and not more:
        for key, value in typed(inner, list[tuple[str | int | bool, Any]], path):
            check_tree(value, f"{path}/{shown(str(key))}", arrays)
    elif kind in ("list", "tuple") and not more:
        for number, value in enumerate(typed(inner, list[Any], path)):
            check_tree(value, f"{path}/{number}", arrays)
    elif not (
        isinstance(tree, dict)
        and tree.keys() == {"array", "library"}
        and tree["array"] in arrays
        and tree["library"] in ("numpy", "scalar", *filter(None, ADAPTERS))
    ):
        raise TypeError(f"{path} is neither a value nor an array of the checkpoint")
