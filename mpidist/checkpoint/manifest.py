"""The manifest of a checkpoint: its states and the segments of its arrays.

Nothing is pickled, so loading a checkpoint runs no code from it; what is read is checked before
it is used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError
from ..foreign import read_file, read_json, shown, typed
from ..frameworks.base import find_dtype
from .files import write
from .segments import Segment, Stored, check_array
from .tree import check_tree, unflatten

FORMAT = 2
NAME = "manifest.json"


@dataclass
class _Content:
    """The JSON of a manifest; a segment has the fields of :class:`Segment`."""

    format: int
    step: int
    ranks: int
    trees: dict[str, Any]
    arrays: dict[str, tuple[str, tuple[int, ...], list[tuple[str, int, int, int, str]]]]
    divided: dict[str, tuple[Literal["rank", "stage"], int]]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint: states, arrays and their segments."""

    step: int
    ranks: int  # number of ranks that wrote it
    trees: dict[str, Any]  # JSON tree of each saved state, by name; see :func:`flatten`
    # Dtype, shape and segments of each array, by its path, such as "model/0.weight".
    arrays: dict[str, tuple[str, tuple[int, ...], tuple[Segment, ...]]]
    # States saved per rank or per stage, by name: ("rank", number of ranks) or ("stage", number of
    # stages). The tree of such a state has an entry for each.
    divided: dict[str, tuple[str, int]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the manifest; its first line is the checksum of the rest."""
        arrays = {
            path: [dtype, list(shape), [astuple(segment) for segment in segments]]
            for path, (dtype, shape, segments) in self.arrays.items()
        }
        body = json.dumps(
            {
                "format": FORMAT,
                "step": self.step,
                "ranks": self.ranks,
                "trees": self.trees,
                "arrays": arrays,
                "divided": self.divided,
            }
        ).encode()
        checksum = hashlib.sha256(body).hexdigest().encode()
        write(folder / NAME, [checksum + b"\n", body, b"\n"])

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read the manifest and check its checksum.

        CheckpointError if it is missing or damaged, or has a format that this version cannot read.
        """
        where = folder / NAME
        try:
            checksum, body = read_file(where, follow=False).split(b"\n", 1)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from None
        if hashlib.sha256(body.rstrip(b"\n")).hexdigest().encode() != checksum:
            raise CheckpointError(f"{where} is damaged: its checksum does not match")
        found = read_json(body, str(where), dict[str, Any], CheckpointError)
        if found.get("format") != FORMAT:
            text = shown(f"{found.get('format')!r:.60}")
            raise CheckpointError(f"{where} has format {text}: this version reads {FORMAT}")
        try:
            content = typed(found, _Content)
            arrays = {
                path: (dtype, shape, tuple(Segment(*segment) for segment in segments))
                for path, (dtype, shape, segments) in content.arrays.items()
            }
            for path, array in arrays.items():
                check_array(f"arrays.{shown(path)}", *array)
            for name, tree in content.trees.items():
                check_tree(tree, f"trees.{shown(name)}", arrays)
            for name, (_, count) in content.divided.items():
                tree = content.trees.get(name)
                if not isinstance(tree, dict) or len(tree.get("dict", ())) != count:
                    raise TypeError(f"divided.{shown(name)}: expected {count} states of that name")
            if content.step < 0 or content.ranks < 1:
                raise TypeError(f"step {content.step} of {content.ranks} ranks: expected >= 0, > 0")
        except TypeError as error:
            raise CheckpointError(f"{where} is damaged: {error}") from None
        return cls(content.step, content.ranks, content.trees, arrays, content.divided)

    def segments(self) -> list[tuple[str, Segment]]:
        """List (path of the array, segment) for all segments, array by array."""
        return [(path, s) for path, (_, _, segments) in self.arrays.items() for s in segments]

    def itemsizes(self) -> dict[str, int]:
        """Return the bytes of an element of each array, by the array's path."""
        return {path: find_dtype(dtype).itemsize for path, (dtype, _, _) in self.arrays.items()}

    def state(self, name: str, folder: Path, whole: bool, key: int | None = None) -> Any:
        """Return the state saved under `name`; of one saved per rank or stage, that of `key`.

        With `whole` its arrays are read now; otherwise they are :class:`Stored`, read later.
        """

        def give(path: str, library: str) -> Any:
            dtype, shape, segments = self.arrays[path]
            stored = Stored(folder, find_dtype(dtype), shape, segments, library)
            return stored.whole() if whole else stored

        tree = self.trees[name]
        return unflatten(tree if key is None else dict(tree["dict"])[key], give)
