"""States of models and optimizers as JSON and arrays: no pickle, so reading one runs no code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.recognise import on_host
from ..errors import InvalidArgument
from .framework import ADAPTERS, library
from .pieces import Part

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
    """

    flat: np.ndarray
    start: int
    shape: tuple[int, ...]
    whole: bool


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
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [take_apart(v, f"{path}/{i}", leaves) for i, v in enumerate(value)]}
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
    leaves[path] = Leaf(flat, part.start, part.shape, part is not value)
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


def merge(trees: list[Any]) -> Any:
    """Join the trees of all ranks, which differ in the entries of dicts."""
    first = trees[0]
    if not isinstance(first, dict) or "dict" not in first:
        return first
    joined: dict[Any, list[Any]] = {}
    for tree in trees:
        for key, value in tree["dict"]:
            joined.setdefault(key, []).append(value)
    return {"dict": [[key, merge(values)] for key, values in joined.items()]}


def _module(name: str) -> Any:
    return importlib.import_module(ADAPTERS[name])
