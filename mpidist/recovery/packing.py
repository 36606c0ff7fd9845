"""States as bytes: the arrays of several in a row, objects for a vault, and back."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checkpoint.segments import convert
from ..checkpoint.tree import Leaf, flatten, is_divided, merge, unflatten
from ..errors import MpidistError
from ..frameworks.base import dtype_name, find_dtype

Packed = tuple[str, dict[str, tuple[np.ndarray, str, int, tuple[int, ...], bool]]]
"""A state: the JSON tree in which :func:`flatten` puts it, and its arrays, as bytes, by path."""


def packed(value: Any, name: str) -> Packed:
    """Return a state with the bytes of its arrays, which are views where that is possible."""
    leaves: dict[str, Leaf] = {}
    tree = flatten(value, name, leaves)
    arrays = {
        path: (
            leaf.flat.view(np.uint8),
            dtype_name(leaf.flat.dtype),
            leaf.start,
            leaf.shape,
            leaf.whole,
        )
        for path, leaf in leaves.items()
    }
    return tree, arrays


@dataclass(frozen=True)
class Joined:
    """An array of which each rank had a part, as :meth:`ZeroOptimizer.load_state_dict` reads it."""

    flat: np.ndarray
    library: str

    def read(self, start: int, stop: int) -> Any:
        """Return elements `start` to `stop` (exclusive) of the flattened array."""
        return convert(self.flat[start:stop].copy(), self.library, (stop - start,))


def is_part(state: Packed) -> bool:
    """Return whether a state is a part of one of all ranks together: ZeRO's, a pipeline's."""
    tree, arrays = state
    return any(not whole for *_, whole in arrays.values()) or is_divided(tree)


def unpacked(states: Sequence[Packed], name: str) -> Any:
    """Return the state of which each of `states` may be the part of one rank."""

    def unlike(path: str, ranks: Sequence[int]) -> None:
        raise MpidistError(f"{path} differs between ranks: declare {name} in per_rank")

    def give(path: str, library: str) -> Any:
        parts = [arrays[path] for _, arrays in states if path in arrays]
        flat, dtype, start, shape, whole = parts[0]
        kind = find_dtype(dtype)
        if whole:
            return convert(flat.view(kind).copy(), library, shape)
        joined = np.empty(int(np.prod(shape)), kind)
        for flat, _, start, _, _ in parts:
            piece = flat.view(kind)
            joined[start : start + len(piece)] = piece
        return Joined(joined, library)

    return unflatten(merge({r: tree for r, (tree, _) in enumerate(states)}, name, unlike), give)


def arrays_of(states: Mapping[str, Packed]) -> list[np.ndarray]:
    """Return the arrays of states, as bytes."""
    return [array for _, arrays in states.values() for array, *_ in arrays.values()]


def lengths_of(states: Mapping[str, Packed]) -> dict[str, Any]:
    """Return states with the lengths of their arrays in place of these."""
    return {
        name: (tree, {path: (len(a), *rest) for path, (a, *rest) in arrays.items()})
        for name, (tree, arrays) in states.items()
    }


def filled(lengths: Mapping[str, Any], flat: np.ndarray) -> dict[str, Packed]:
    """Return the states of :func:`lengths_of`, whose arrays are in a row in `flat`."""
    states: dict[str, Packed] = {}
    at = 0
    for name, (tree, arrays) in lengths.items():
        given = {}
        for path, (length, *rest) in arrays.items():
            given[path] = (flat[at : at + length], *rest)
            at += length
        states[name] = tree, given
    return states


def to_parts(content: object) -> list[bytes | memoryview]:
    """Return an object as bytes for a vault; its arrays are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(content, 5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    return [struct.pack(f"<{len(raw) + 2}Q", len(raw), len(head), *map(len, raw)), head, *raw]


def from_bytes(data: bytes | np.ndarray) -> Any:
    """Return the object of :func:`to_parts`; its arrays are views of `data`."""
    view = memoryview(data)  # type: ignore[arg-type]
    (count,) = struct.unpack_from("<Q", view)
    lengths = struct.unpack_from(f"<{count + 1}Q", view, 8)
    at, parts = 8 * (count + 2), []
    for length in lengths:
        parts.append(view[at : at + length])
        at += length
    return pickle.loads(parts[0], buffers=parts[1:])
