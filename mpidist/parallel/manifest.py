"""The table of contents of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .disk import write
from .dtypes import find_dtype
from .stored import Segment, Stored
from .tree import put_together

FORMAT = 2
READ = (1, 2)  # 1 has no "divided"
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint, and where.

    Attributes
    ----------
    step, ranks : int
        The step, and the number of ranks that wrote.
    trees : dict
        What was saved, by name: JSON of :func:`~mpidist.parallel.tree.take_apart`.
    arrays : dict
        By path: dtype, shape, segments.
    divided : dict
        By name, of what is not the same on all ranks: ("rank" or "stage", how many there were).
        The tree has an entry for each.
    """

    step: int
    ranks: int
    trees: dict[str, Any]
    arrays: dict[str, tuple[str, tuple[int, ...], tuple[Segment, ...]]]
    divided: dict[str, tuple[str, int]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it, with its own checksum in the first line."""
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
        """Read and check it.

        Raises
        ------
        CheckpointError
            If it is damaged, or of another format.
        """
        try:
            checksum, body = (folder / NAME).read_bytes().split(b"\n", 1)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / NAME} cannot be read: {error}") from None
        if hashlib.sha256(body.rstrip(b"\n")).hexdigest().encode() != checksum:
            raise CheckpointError(f"{folder / NAME} is damaged: its checksum does not match")
        found = json.loads(body)
        if found["format"] not in READ:
            raise CheckpointError(
                f"{folder / NAME} has format {found['format']}: this version reads {READ}"
            )
        arrays = {
            path: (dtype, tuple(shape), tuple(Segment(*segment) for segment in segments))
            for path, (dtype, shape, segments) in found["arrays"].items()
        }
        divided = {name: (by, count) for name, (by, count) in found.get("divided", {}).items()}
        return cls(found["step"], found["ranks"], found["trees"], arrays, divided)

    def segments(self) -> list[tuple[str, Segment]]:
        """List the path and place of everything."""
        return [(path, s) for path, (_, _, segments) in self.arrays.items() for s in segments]

    def itemsizes(self) -> dict[str, int]:
        """Give the bytes of an element of each array."""
        return {path: find_dtype(dtype).itemsize for path, (dtype, _, _) in self.arrays.items()}

    def state(self, name: str, folder: Path, whole: bool, key: int | None = None) -> Any:
        """Give what was saved by a name.

        Parameters
        ----------
        key : int, optional
            Of what is divided: the rank, or stage.
        whole : bool
            Whether arrays are read now; else they are :class:`~.stored.Stored`.
        """

        def give(path: str, library: str) -> Any:
            dtype, shape, segments = self.arrays[path]
            stored = Stored(folder, find_dtype(dtype), shape, segments, library)
            return stored.whole() if whole else stored

        tree = self.trees[name]
        return put_together(tree if key is None else dict(tree["dict"])[key], give)
