"""The format of a checkpoint: states as JSON and arrays, array files and the manifest.

There is no pickle in it, so reading one runs no code.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..device.recognise import on_host
from ..errors import CheckpointError, InvalidArgument
from ..frameworks.base import adapter, find_dtype, framework_of, library
from ..schedule import blocks
from .files import write


@dataclass(frozen=True)
class Part:
    """Some elements of an array that all ranks have together.

    Attributes
    ----------
    array : array, 1-D
        The elements, of numpy or torch.
    start : int
        Where they begin in the whole array, flat.
    shape : tuple of int
        Of the whole array.
    """

    array: Any
    start: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements of the whole array."""
        return math.prod(self.shape)


class Divided(dict):
    """A dict of a state whose entries belong to some of the ranks; elsewhere all have all of them.

    What several ranks have under one key must be the same on those.
    """


@dataclass(frozen=True)
class Led:
    """An array of a state that may differ between ranks: the one of the lowest rank counts."""

    array: Any


def is_divided(state: Any) -> bool:
    """Return whether this is the state of a :class:`ZeroOptimizer`, from a checkpoint."""
    needed, known = {"state", "options"}, {"state", "options", "sending"}
    return isinstance(state, Mapping) and needed <= set(state) <= known


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
    array = framework_of(part.array).as_array(on_host(part.array))
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
    return adapter(None if name == "numpy" else name, "framework").FRAMEWORK.from_array(array)


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
        What was saved, by name: JSON of :func:`~mpidist.checkpoint.format.take_apart`.
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
