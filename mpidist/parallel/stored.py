"""Arrays of a checkpoint: written in pieces, each with a checksum, and read in any others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..schedule import blocks
from .disk import write
from .tree import Leaf, convert

PIECE_BYTES = 16 << 20  # what is read, and checked, at once
SMALL_BYTES = 64 << 10  # shorter arrays are written by one rank, whole


@dataclass(frozen=True)
class Segment:
    """Some elements of an array in a file.

    Attributes
    ----------
    file : str
        Name of the file.
    offset : int
        In bytes.
    start, count : int
        Elements, of the flat array.
    checksum : str
        SHA-256 of the bytes.
    """

    file: str
    offset: int
    start: int
    count: int
    checksum: str


Holders = Mapping[str, Sequence[int]]


def shares(
    leaves: Mapping[str, Leaf], holders: Holders, rank: int
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Give what this rank writes: path, place in the whole array, and elements.

    What is whole on several ranks, its `holders`, is divided among them.
    """
    numbers = {path: number for number, path in enumerate(sorted(holders))}
    for path, leaf in leaves.items():
        first, flat = leaf.start, leaf.flat
        if leaf.whole:
            ranks = list(holders[path])
            if rank not in ranks:
                continue
            if flat.nbytes < SMALL_BYTES:
                writes = ranks[numbers[path] % len(ranks)] == rank
                mine = slice(0, flat.size if writes else 0)
            else:
                block = blocks(flat.size, len(ranks))[ranks.index(rank)]
                mine = slice(block.start, block.stop)
            first, flat = mine.start, flat[mine]
        step = max(1, PIECE_BYTES // max(flat.itemsize, 1))
        for begin in range(0, flat.size, step):
            yield path, first + begin, flat[begin : begin + step]


def write_shares(
    folder: Path, leaves: Mapping[str, Leaf], holders: Holders, rank: int
) -> dict[str, list[Segment]]:
    """Write this rank's share into a file of its own; give where everything is."""
    name, offset = f"rank-{rank:05d}.bin", 0
    found: dict[str, list[Segment]] = {}

    def chunks() -> Iterator[bytes]:
        nonlocal offset
        for path, start, flat in shares(leaves, holders, rank):
            data = flat.tobytes()
            checksum = hashlib.sha256(data).hexdigest()
            found.setdefault(path, []).append(Segment(name, offset, start, flat.size, checksum))
            offset += len(data)
            yield data

    write(folder / name, chunks())
    return found


@dataclass(frozen=True)
class Stored:
    """An array of a checkpoint, read when it is wanted.

    Attributes
    ----------
    folder : Path
        Of the checkpoint.
    dtype : dtype
        Of the elements.
    shape : tuple of int
        Of the whole array.
    segments : tuple of Segment
        Where the elements are.
    library : str
        What the array was of.
    """

    folder: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    library: str

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def read(self, start: int = 0, stop: int | None = None) -> Any:
        """Give elements `start` to `stop` of the flat array; without bounds a scalar as it was."""
        if self.shape == ():
            return self.whole()
        stop = self.count if stop is None else stop
        return convert(self._elements(start, stop), self.library, (stop - start,))

    def whole(self) -> Any:
        """Give the array."""
        return convert(self._elements(0, self.count), self.library, self.shape)

    def _elements(self, start: int, stop: int) -> np.ndarray:
        flat = np.empty(stop - start, self.dtype)
        have = 0
        for segment in self.segments:
            first = max(start, segment.start)
            last = min(stop, segment.start + segment.count)
            if first >= last:
                continue
            with open(self.folder / segment.file, "rb") as file:
                file.seek(segment.offset + (first - segment.start) * self.dtype.itemsize)
                data = file.read((last - first) * self.dtype.itemsize)
            flat[first - start : last - start] = np.frombuffer(data, self.dtype)
            have += last - first
        if have != stop - start:
            raise CheckpointError(
                f"{self.folder}: {have} of elements {start} to {stop} of an array are stored"
            )
        return flat


def damaged(folder: Path, segments: list[tuple[str, Segment]], itemsize: dict[str, int]) -> str:
    """Say which array's bytes are not what was written; nothing if all are."""
    for path, segment in segments:
        with open(folder / segment.file, "rb") as file:
            file.seek(segment.offset)
            data = file.read(segment.count * itemsize[path])
        if hashlib.sha256(data).hexdigest() != segment.checksum:
            return f"{folder / segment.file} is damaged: the checksum of {path} does not match"
    return ""
