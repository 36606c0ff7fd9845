"""States of models and optimizers as JSON and arrays: no pickle, so reading one runs no code."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.recognise import on_host
from ..errors import InvalidArgument
from .framework import ADAPTERS, library
from .pieces import Divided, Led, Part

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Leaf:
    """An array of a state, or a part of one, and how it was held.

    Attributes
    ----------
    flat : ndarray, 1-D
        The elements.
    start : int
        Of a part: where it begins in the whole.
    shape : tuple of int
        Of the whole.
    whole : bool
        Whether all elements are here; then they are the same on every rank.
    led : bool
        Whether they may differ between ranks, and those of the lowest rank count.
    """

    flat: np.ndarray
    start: int
    shape: tuple[int, ...]
    whole: bool
    led: bool = False


def state_of(value: Any) -> Any:
    """Return the state of an object as a checkpoint takes it, or a plain state as it is."""
    for name in ("checkpoint_state", "state_dict"):
        if hasattr(value, name):
            return getattr(value, name)()
    return value


def take_apart(value: Any, path: str, leaves: dict[str, Leaf]) -> Any:
    """Give a state as JSON; its arrays are added to `leaves` by their paths.

    Raises
    ------
    InvalidArgument
        If something in it is neither an array nor a number, string, list, tuple or dict; the
        message gives its path.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        items = [[key, take_apart(v, f"{path}/{key}", leaves)] for key, v in value.items()]
        if any(not isinstance(key, (str, int)) for key, _ in items):
            raise InvalidArgument(f"{path} has keys that are neither strings nor whole numbers")
        return {"divided" if isinstance(value, Divided) else "dict": items}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [take_apart(v, f"{path}/{i}", leaves) for i, v in enumerate(value)]}
    led = isinstance(value, Led)
    value = value.array if led else value
    part = value if isinstance(value, Part) else Part(value, 0, tuple(np.shape(value)))
    name = library(part.array) or "numpy"
    held = on_host(part.array)
    array = _module(name).as_array(held) if name in ADAPTERS else held
    if not isinstance(array, (np.ndarray, np.generic)) or array.dtype.hasobject:
        raise InvalidArgument(
            f"{path} is of {type(value).__name__}: allowed are arrays of numpy and torch, numbers, "
            "strings, None, lists, tuples and dicts"
        )
    if path in leaves:
        raise InvalidArgument(f"{path} is the path of two arrays: rename a key")
    scalar = isinstance(array, np.generic)
    flat = np.ascontiguousarray(array).reshape(-1)
    leaves[path] = Leaf(flat, part.start, part.shape, part is not value, led)
    return {"array": path, "library": "scalar" if scalar else name}


def put_together(tree: Any, give: Callable[[str, str], Any]) -> Any:
    """Give the state back; ``give(path, library)`` gives its arrays."""
    if not isinstance(tree, dict):
        return tree
    if "dict" in tree:
        return {key: put_together(v, give) for key, v in tree["dict"]}
    for kind, make in (("tuple", tuple), ("list", list)):
        if kind in tree:
            return make(put_together(v, give) for v in tree[kind])
    return give(tree["array"], tree["library"])


def read_all(state: Any) -> Any:
    """Give a state whose stored arrays are read."""
    if isinstance(state, Mapping):
        return {key: read_all(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(read_all, state))
    whole = getattr(state, "whole", None)
    return state if whole is None else whole()


def convert(flat: np.ndarray, name: str, shape: tuple[int, ...]) -> Any:
    """Give an array to the library that it was of."""
    array = flat.reshape(shape)
    if name == "scalar":
        return array[()]
    return array if name == "numpy" else _module(name).from_array(array)


def merge(trees: Mapping[int, Any], path: str, unlike: Callable[[str, Sequence[int]], None]) -> Any:
    """Return the tree that ranks have in common, joined where a dict is divided among them.

    Parameters
    ----------
    trees : mapping of int to tree
        By rank.
    path : str
        Path of the trees.
    unlike : callable
        ``unlike(path, ranks)`` is told what some ranks have otherwise than the lowest.
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
    found: dict[Any, dict[int, Any]] = {}
    for rank, tree in sorted(trees.items()):
        for key, value in tree[name]:
            found.setdefault(key, {})[rank] = value
    if name == "dict":
        for key, held in found.items():
            if len(held) < len(trees):
                unlike(f"{path}/{key}", sorted(set(trees) - set(held)))
    return {"dict": [[key, merge(held, f"{path}/{key}", unlike)] for key, held in found.items()]}


def _kind(tree: Any) -> tuple[Any, ...]:
    """Return what must be equal of two trees apart from the entries inside."""
    if isinstance(tree, dict):
        for name in ("dict", "divided"):
            if name in tree:
                return (name,)
        for name in ("list", "tuple"):
            if name in tree:
                return name, len(tree[name])
    return "value", json.dumps(tree)  # tells True from 1, -0.0 from 0.0, and has NaN equal NaN


def _module(name: str) -> Any:
    return importlib.import_module(ADAPTERS[name])
