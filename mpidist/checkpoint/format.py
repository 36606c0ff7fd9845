"""The format of a checkpoint: states as JSON and arrays, safetensors files and the manifest.

Nothing is pickled, so loading a checkpoint runs no code from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..device.recognise import on_host
from ..errors import CheckpointError, InvalidArgument, MpidistError
from ..foreign import open_regular, read_file, read_json, shown, typed
from ..frameworks.base import ADAPTERS, adapter, dtype_name, find_dtype, framework_of, library
from ..schedule import blocks
from .files import write


@dataclass(frozen=True)
class Part:
    """A rank's slice of an array that is distributed over the ranks; `array` is flat."""

    array: Any
    start: int  # first element of the slice in the flattened array
    shape: tuple[int, ...]  # of the whole array

    @property
    def count(self) -> int:
        """Number of elements of the whole array."""
        return math.prod(self.shape)


class Divided(dict):
    """A dict of which each rank has only some of the keys; in the checkpoint they are joined.

    Entries that several ranks have under the same key must be equal.
    """


@dataclass(frozen=True)
class MayDiffer:
    """Marker of an array that may differ between ranks; the lowest rank that has it saves it."""

    array: Any


def is_zero_state(state: Any) -> bool:
    """Return whether a state is that of a :class:`~mpidist.ZeroOptimizer`, by its keys."""
    needed, known = {"state", "options"}, {"state", "options", "sending"}
    return isinstance(state, Mapping) and needed <= set(state) <= known


PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Leaf:
    """An array in a state, or a rank's slice of one."""

    flat: np.ndarray  # elements of the array or of the slice
    start: int  # of the slice in the flattened array; 0 for a whole array
    shape: tuple[int, ...]  # of the whole array
    whole: bool  # whether it is an array, not a slice of one
    may_differ: bool = False  # whether ranks may have different values (:class:`MayDiffer`)


def state_of(value: Any) -> Any:
    """Return an object's ``checkpoint_state()`` or ``state_dict()``; other values unchanged."""
    for name in ("checkpoint_state", "state_dict"):
        if hasattr(value, name):
            return getattr(value, name)()
    return value


DEEPEST_STATE = 50  # a dict is three levels of JSON, of which read_json allows 200


def flatten(value: Any, path: str, leaves: dict[str, Leaf], depth: int = 0) -> Any:
    """Return a state as a JSON tree; its arrays are added to `leaves` by path.

    `path` is the name of the state; the paths in it append the keys, such as "model/0.weight".
    InvalidArgument, with the path, for a value that is neither an array nor a number, string, None,
    list, tuple or dict; for an array of records, or one that is not the memory it shows (masked, a
    wrapper of tensors); and for one nested too deep.
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
    part = value if isinstance(value, Part) else Part(array, 0, np.shape(array))
    flat = np.ascontiguousarray(array).reshape(-1)
    leaves[path] = Leaf(flat, part.start, part.shape, part is not value, may_differ)
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


def read_all(state: Any) -> Any:
    """Return a state with every :class:`Stored` array read."""
    if isinstance(state, Mapping):
        return {key: read_all(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(read_all, state))
    whole = getattr(state, "whole", None)
    return state if whole is None else whole()


def convert(flat: np.ndarray, name: str, shape: tuple[int, ...]) -> Any:
    """Return flat elements in the given shape as an array of the library `name`.

    With the name "scalar" it is a numpy scalar.
    """
    array = flat.reshape(shape)
    if name == "scalar":
        return array[()]
    return adapter(None if name == "numpy" else name, "framework").FRAMEWORK.from_array(array)


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


_FILE = re.compile(r"rank-[0-9]{5,}\.safetensors")


def _check_array(path: str, name: str, shape: tuple[int, ...], segments: Sequence[Segment]) -> None:
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


def _check_tree(tree: Any, path: str, arrays: Mapping[str, Any]) -> None:
    """Raise TypeError unless a JSON tree has the form that :func:`flatten` returns."""
    if isinstance(tree, PLAIN):
        return
    (kind, inner), *more = tree.items() if isinstance(tree, dict) and tree else ((None, None),)
    if kind == "dict" and not more:
        for key, value in typed(inner, list[tuple[str | int | bool, Any]], path):
            _check_tree(value, f"{path}/{shown(str(key))}", arrays)
    elif kind in ("list", "tuple") and not more:
        for number, value in enumerate(typed(inner, list[Any], path)):
            _check_tree(value, f"{path}/{number}", arrays)
    elif not (
        isinstance(tree, dict)
        and tree.keys() == {"array", "library"}
        and tree["array"] in arrays
        and tree["library"] in ("numpy", "scalar", *filter(None, ADAPTERS))
    ):
        raise TypeError(f"{path} is neither a value nor an array of the checkpoint")


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
                _check_array(f"arrays.{shown(path)}", *array)
            for name, tree in content.trees.items():
                _check_tree(tree, f"trees.{shown(name)}", arrays)
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
