"""The arrays of a checkpoint: divided among the ranks, in safetensors files, with checksums."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, InvalidArgument
from ..foreign import open_regular, shown
from ..frameworks.base import adapter, dtype_name, find_dtype
from ..schedule import blocks
from .files import write
from .tree import Leaf

PIECE_BYTES = 16 << 20  # longest segment: the unit of reading and of checksums
SMALL_BYTES = 64 << 10  # a shorter array is written whole, by one rank


@dataclass(frozen=True)
class Segment:
    """A contiguous run of an array's elements in a file, of at most 16 MiB."""

    file: str
    offset: int  # in the file, in bytes
    start: int  # first element in the flattened array
    count: int  # number of elements
    checksum: str  # SHA-256 of the bytes


Holders = Mapping[str, Sequence[int]]


def shares(
    leaves: Mapping[str, Leaf], holders: Holders, rank: int
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield what this rank writes of each array: path, index of the first element, elements.

    `holders` has the ranks that have each array, by path: a large array is divided among them, one
    below 64 KiB is written by one of them.  A slice is written by the rank that has it.
    """
    numbers = {path: number for number, path in enumerate(sorted(holders))}
    for path, leaf in leaves.items():
        first, flat = leaf.start, leaf.flat
        if leaf.whole:
            ranks = list(holders[path])
            if flat.nbytes < SMALL_BYTES:  # by turns, so that no rank writes all the small ones
                ranks = [ranks[numbers[path] % len(ranks)]]
            if rank not in ranks:
                continue
            block = blocks(flat.size, len(ranks))[ranks.index(rank)]
            first, flat = block.start, flat[block.start : block.stop]
        if flat.size or leaf.whole:
            yield path, first, flat


# The dtypes of the safetensors format; elements of others are declared as bytes, U8.
_DECLARED = {"|b1": "BOOL", "|i1": "I8", "|u1": "U8", "bfloat16": "BF16", "<c8": "C64"}
_DECLARED |= {f"<{kind}{size}": f"{kind.upper()}{8 * size}" for kind in "iu" for size in (2, 4, 8)}
_DECLARED |= {f"<f{size}": f"F{8 * size}" for size in (2, 4, 8)}
_DECLARED |= {"float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}


def header(written: Sequence[tuple[str, int, np.ndarray]], leaves: Mapping[str, Leaf]) -> bytes:
    """Return the header of a safetensors file for `written`, the results of :func:`shares`.

    `leaves` has the arrays by path: their shapes go into the header.  InvalidArgument if a path is
    also the name of a slice of another array.
    """
    dtypes: dict[str, str] = {}
    tensors: dict[str, Any] = {"__metadata__": dtypes}
    end = 0
    for path, start, flat in written:
        whole = flat.size == math.prod(leaves[path].shape)
        name = path if whole else f"{path}[{start}:{start + flat.size}]"
        if name in tensors:
            raise InvalidArgument(f"{name} is the name of two arrays in a file: rename a key")
        shape = leaves[path].shape if whole else flat.shape
        dtype = dtype_name(flat.dtype)
        if dtype not in _DECLARED:
            dtypes[name], shape = dtype, (*shape, flat.itemsize)
        begin, end = end, end + flat.nbytes
        declared = _DECLARED.get(dtype, "U8")
        tensors[name] = {"dtype": declared, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)  # the arrays behind it are aligned, as the format asks
    return struct.pack("<Q", len(text)) + text


def write_shares(
    folder: Path, leaves: Mapping[str, Leaf], holders: Holders, rank: int
) -> dict[str, list[Segment]]:
    """Write this rank's share of the arrays (see :func:`shares`) to a file in `folder`.

    Returns the segments that it wrote, by the path of the array.
    """
    # Longest elements first, those declared as bytes last: each array is aligned in the file.
    written = sorted(
        shares(leaves, holders, rank),
        key=lambda share: -share[2].itemsize * (dtype_name(share[2].dtype) in _DECLARED),
    )
    name, start_of_data = f"rank-{rank:05d}.safetensors", header(written, leaves)
    found: dict[str, list[Segment]] = {}

    def chunks() -> Iterator[bytes | memoryview]:
        yield start_of_data
        offset = len(start_of_data)
        for path, first, flat in written:
            step = max(1, PIECE_BYTES // max(flat.itemsize, 1))
            for begin in range(0, flat.size, step):
                piece = flat[begin : begin + step]
                data = piece.view(np.uint8).data  # no copy
                checksum = hashlib.sha256(data).hexdigest()
                segment = Segment(name, offset, first + begin, piece.size, checksum)
                found.setdefault(path, []).append(segment)
                offset += len(data)
                yield data

    write(folder / name, chunks())
    return found


@dataclass(frozen=True)
class Stored:
    """An array in a checkpoint, read lazily and by slice."""

    folder: Path  # of the checkpoint
    dtype: np.dtype
    shape: tuple[int, ...]  # of the whole array
    segments: tuple[Segment, ...]  # ascending
    library: str  # of the array that was saved: "numpy", "torch", …, or "scalar" for a numpy scalar

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> Any:
        """Return elements `start` to `stop` (exclusive) of the flattened array.

        An array of no dimensions is returned whole, in its shape.
        """
        if self.shape == ():
            return self.whole()
        stop = self.count if stop is None else stop
        return convert(self._elements(start, stop), self.library, (stop - start,))

    def whole(self) -> Any:
        """Read and return the whole array."""
        return convert(self._elements(0, self.count), self.library, self.shape)

    def _elements(self, start: int, stop: int) -> np.ndarray:
        """Read elements `start` to `stop` from the segments that have some of them."""
        # From each segment, what lies in both::
        #
        #     segments   |------|------|------|
        #     elements       start |--------| stop     reads the ends of two only
        flat = np.empty(stop - start, self.dtype)
        have = 0
        for segment in self.segments:
            first = max(start, segment.start)
            last = min(stop, segment.start + segment.count)
            if first >= last:
                continue
            piece = flat[first - start : last - start].view(np.uint8)
            offset = segment.offset + (first - segment.start) * self.dtype.itemsize
            try:
                with open_regular(self.folder / segment.file, follow=False) as file:
                    file.seek(offset)
                    there = file.readinto(piece.data)
            except OSError as error:
                raise CheckpointError(f"an array cannot be read: {error}") from error
            if there != piece.size:
                raise CheckpointError(
                    f"{self.folder / segment.file} is damaged: it has {there} of the {piece.size} "
                    f"bytes at {offset}"
                )
            have += last - first
        if have != stop - start:
            raise CheckpointError(
                f"{self.folder} is incomplete: it has {have} elements from {start} on of an array, "
                f"expected {stop - start}"
            )
        return flat


def convert(flat: np.ndarray, name: str, shape: tuple[int, ...]) -> Any:
    """Return flat elements in the given shape as an array of the library `name`.

    With the name "scalar" it is a numpy scalar.
    """
    array = flat.reshape(shape)
    if name == "scalar":
        return array[()]
    return adapter(None if name == "numpy" else name, "framework").FRAMEWORK.from_array(array)


def damaged(folder: Path, segments: list[tuple[str, Segment]], itemsize: dict[str, int]) -> str:
    """Return a message on the first segment with a wrong checksum; "" if all match.

    `segments` and `itemsize` are from :meth:`Manifest.segments` and :meth:`Manifest.itemsizes`.
    """
    for path, segment in segments:
        with open_regular(folder / segment.file, follow=False) as file:
            size = segment.count * itemsize[path]
            # Before it is read: a file may have been cut short, and `size` be anything.
            if segment.offset + size > os.fstat(file.fileno()).st_size:
                return f"{folder / segment.file} is damaged: it ends before {path}"
            file.seek(segment.offset)
            data = file.read(size)
        if hashlib.sha256(data).hexdigest() != segment.checksum:
            return f"{folder / segment.file} is damaged: the checksum of {path} does not match"
    return ""


_FILE = re.compile(r"rank-[0-9]{5,}\.safetensors")


def check_array(path: str, name: str, shape: tuple[int, ...], segments: Sequence[Segment]) -> None:
    """Raise TypeError unless an array's segments are all of it, each element once, in its order.

    Only files that a save writes are named, so nothing outside of the folder is read.
    """
    try:
        dtype = find_dtype(name)
        known = dtype_name(dtype) == name and dtype.itemsize > 0 and not dtype.hasobject
    except Exception:  # numpy has many, of odd names
        known = False
    if not known or dtype.names or dtype.subdtype:
        raise TypeError(f"{path}: dtype {shown(name[:60])!r} cannot be read here")
    if min(shape, default=0) < 0 or len(shape) > 32:
        raise TypeError(f"{path}: shape {shape}: expected at most 32 numbers >= 0")
    stop = 0
    for segment in segments:
        if not _FILE.fullmatch(segment.file) or segment.offset < 0:
            text = shown(segment.file[:200])
            raise TypeError(f"{path}: {text!r}, {segment.offset}: not a file of a checkpoint")
        if segment.start != stop or segment.count < 1:
            raise TypeError(
                f"{path}: a segment has {segment.count} elements from {segment.start} on: expected "
                f"some from {stop} on"
            )
        stop += segment.count
    if stop != math.prod(shape):
        raise TypeError(f"{path}: segments have {stop} elements, expected {math.prod(shape)}")
