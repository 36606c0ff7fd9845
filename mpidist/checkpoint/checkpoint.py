"""Checkpoints: each rank writes a share; a kill at any point leaves the last complete one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ..arguments import whole
from ..communicator.agreement import answers, check_same
from ..communicator.communicator import check_communicator
from ..errors import CheckpointError, CollectiveMismatch, InvalidArgument, MpidistError
from ..frameworks.base import digest, dtype_name
from ..frameworks.generators import source_of
from ..topology import Grid
from . import files
from .manifest import Manifest
from .segments import Segment, damaged, write_shares
from .state import Divided, is_zero_state, state_of
from .tree import Leaf, flatten, merge

_NAME = re.compile(r"step-(\d+)\.(\d+)")
_SHOWN = 5  # most differences that an error message lists

Entry = tuple[str, tuple[int, ...], bool, int, int, tuple[int, ...] | None]
"""A rank's array: dtype, shape, whether it is whole, first element, element count, digest."""


class Checkpoint:
    """Checkpoints of a training run, in a folder that all ranks share.

    Parameters
    ----------
    folder : path
        Folder of the checkpoints; created if it does not exist.
    comm : Communicator or Grid
        The ranks; :meth:`save` and :meth:`load` are collective.  With a :class:`~mpidist.Grid`
        states are saved and restored per stage, and must be equal on the replicas of a stage.
    keep : int
        Number of checkpoints to keep, > 0: those of the highest steps.  The one saved last is kept
        in any case.

    Notes
    -----
    Objects with ``state_dict()``, such as models, optimizers and shards, can be saved, and plain
    states of arrays, numbers, strings, None, lists, tuples and dicts.  Nothing is pickled.
    Subclasses of these come back as the class itself: a namedtuple as a tuple, an OrderedDict as a
    dict, an IntEnum as an int, a matrix as an array.  Arrays that are more than their memory, such
    as masked ones, are refused.

    A state must be equal on all ranks (checked); each rank writes a share of it, and it can be
    loaded on any number of ranks.  States that differ between ranks must be declared:

    - ``save(…, per_rank=…)``: each rank saves a state of its own, and loads the same one back.
    - Random number generators are always per rank: a Generator or RandomState of numpy, a
      Generator of PyTorch, a Random of Python, and the modules ``random``, ``numpy.random``,
      ``torch`` and ``torch.cuda``.
    - A :class:`~mpidist.Pipeline` is saved per stage, a :class:`~mpidist.ZeroOptimizer` by slices.
    - Of a :class:`~mpidist.DDP` with ``buffers="broadcast"``, rank 0's buffers are saved; with
      ``buffers="keep"`` every rank's (loaded on another number of ranks, all get rank 0's).

    Arrays are in safetensors files, one of each rank, which other tools can open.  All files are
    on the disk before their folder gets its final name, ``step-00000100.0`` for step 100 (``.1``
    if the step is saved again).  Its file ``manifest.json`` has a SHA-256 for each 16 MiB (or less)
    of an array, which :meth:`load` checks.  Waiting for slow ranks is limited by the deadline of
    the communicator.
    """

    def __init__(self, folder: Any, comm: Any, keep: int = 3):
        self._grid = comm if isinstance(comm, Grid) else None
        comm = comm if self._grid is None else self._grid.comm
        check_communicator(comm)
        if not isinstance(folder, (str, PathLike)):
            raise InvalidArgument(f"rank {comm.rank}: folder={folder!r}: expected a path")
        self.keep = whole("keep", keep, 1, f"rank {comm.rank}: ")
        self.folder, self._comm = Path(folder), comm

    # -- saving -----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        per_rank: Mapping[str, Any] | Iterable[str] | str = (),
        **objects: Any,
    ) -> Path:
        """Write a checkpoint and return its folder; collective.

        Parameters
        ----------
        step : int
            Step of the training, ≥ 0.  An existing checkpoint of this step is replaced.
        per_rank : mapping of str to object, or iterable of str
            States that differ between ranks, by name; or which of `objects` differ.
        **objects
            States to save, by name.

        Raises
        ------
        CheckpointError
            On every rank, if any rank could not write or has a value that cannot be saved, if
            a state that is not in `per_rank` differs between ranks, or if an argument is invalid
            on some ranks; the message names the file or the value, such as ``model/0.weight``, and
            the ranks.
        InvalidArgument
            If an argument is invalid on every rank.
        """
        divided: dict[str, tuple[str, int] | None] = {}
        leaves: dict[str, Leaf] = {}
        alone: set[str] = set()  # paths that only this rank has
        joined: dict[str, Any] = {}
        rank, size = self._comm.rank, self._comm.size

        def declare() -> dict[str, Any]:
            nonlocal objects
            number = whole("step", step, 0, f"rank {rank}: ")
            objects, own = self._declared(per_rank, objects)
            divided.update((name, self._division(v, name in own)) for name, v in objects.items())
            by_name = sorted((name, by) for name, by in divided.items() if by)
            return {"step": number, "names": sorted(objects), "per_rank": by_name}

        def gather() -> tuple[dict[str, str], dict[str, Entry]]:
            trees = {}
            for name, value in objects.items():
                before = len(leaves)
                source = source_of(value)
                state = state_of(value) if source is None else source.get_state()
                by = divided[name]
                if by is not None:
                    state = Divided({self._key(by[0]): state})
                trees[name] = json.dumps(flatten(state, name, leaves))
                if size == 1 or (by is not None and by[0] == "rank"):
                    alone.update(list(leaves)[before:])
            entries = {path: _entry(leaf, path not in alone) for path, leaf in leaves.items()}
            return trees, entries

        def prepare() -> tuple[str, Any]:
            nonlocal joined
            if rank:  # comparing parses the trees of every rank: once is enough
                return "", None
            joined, wrong = _compare(trees, tables)
            return wrong, None if wrong else files.make_folder(self.folder, str(step))

        # A round of the ranks after each part that may fail on one of them.  Five, since each part
        # needs that the one before has ended on all ranks:
        #
        #     declare    before gather: the state of a user's object may itself be a collective call
        #     gather     the states, as trees and arrays, with a digest of each array
        #     prepare    rank 0: what is shared is equal on all ranks; a folder, of temporary name
        #     write      each rank its share, into the folder
        #     finish     the manifest, last, once all else is on the disk; then the final name
        declared = self._agree("save", declare, alike=True, first=True)
        check_same(f"rank {rank}: save", declared, CheckpointError)
        trees, tables = map(list, zip(*self._agree("save", gather)))
        wrong, made = self._agree("save", prepare)[0]
        if wrong:
            raise CheckpointError(f"rank {rank}: save: {wrong}")
        holders = {
            path: [r for r, held in enumerate(tables) if path in held]
            for table in tables
            for path in table
        }
        holders |= {path: holders[path][:1] for path, leaf in leaves.items() if leaf.may_differ}
        written = self._agree("save", lambda: write_shares(made, leaves, holders, rank))

        def finish() -> Path | None:
            if rank:
                return None
            kept = {name: by for name, by in divided.items() if by}
            manifest = Manifest(step, size, joined, _join(tables, written), kept)
            manifest.save(made)
            return self._publish(step, made)

        return self._agree("save", finish)[0]

    def _declared(self, per_rank: Any, objects: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
        """Return all objects to save, by name, and the set of names that `per_rank` declares.

        `per_rank` and `objects` are the arguments of :meth:`save`.
        """
        where = f"rank {self._comm.rank}: per_rank={per_rank!r}"
        if isinstance(per_rank, Mapping):
            twice = sorted(set(per_rank) & set(objects))
            if twice:
                raise InvalidArgument(f"{where}: {', '.join(twice)} is also given by keyword")
            if not all(isinstance(name, str) for name in per_rank):
                raise InvalidArgument(f"{where}: expected names that are strings")
            return {**objects, **per_rank}, set(per_rank)
        names = _names(per_rank)
        if names is None or not names <= set(objects):
            raise InvalidArgument(
                f"{where}: expected names of saved objects ({', '.join(objects)}), or a mapping "
                "of names to objects"
            )
        return objects, names

    def _division(self, value: Any, own: bool) -> tuple[str, int] | None:
        """Return ("rank", number of ranks) if the state of `value` is to be saved per rank.

        ("stage", number of stages) if per stage; None if all ranks share it.  `own` is whether the
        user declared it as per rank.
        """
        if own or source_of(value) is not None:
            return "rank", self._comm.size
        if self._grid is not None and not getattr(value, "by_stage", False):
            return "stage", self._grid.shape[1]
        return None

    def _key(self, by: str) -> int:
        """Return this process's rank for `by` "rank", or the number of its stage for "stage"."""
        return self._grid.pipe_index if by == "stage" and self._grid else self._comm.rank

    def _publish(self, step: int, made: Path) -> Path:
        """Rename the folder `made` to its final name, and return that; then remove others.

        Others are earlier checkpoints of the same step, and those beyond the number to keep.
        """
        there = self._found()
        newer = [generation for other, generation, _ in there if other == step]
        final = self.folder / f"step-{step:08d}.{max(newer, default=-1) + 1}"
        # The new one first: a kill in between leaves one too many, never none.
        files.publish(made, final)
        steps = sorted({other for other, _, _ in there} | {step})
        kept = set(steps[-self.keep :]) | {step}
        for other, _, path in there:
            if other not in kept or other == step:
                files.remove(path)
        return final

    # -- loading ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """List the steps of the complete checkpoints, ascending."""
        return sorted({step for step, _, _ in self._found()})

    def load(
        self, step: int | None = None, *, skip: Iterable[str] | str = (), **objects: Any
    ) -> dict[str, Any] | None:
        """Load a checkpoint; collective.

        The number of ranks may differ from that of the save, unless states were saved per rank
        (with a grid: the number of stages must be the same).

        Parameters
        ----------
        step : int, optional
            Step of the checkpoint; by default the highest.
        skip : iterable of str
            Names of states not to load, such as those saved per rank by another number of ranks.
        **objects
            Objects to restore, each by the name under which it was saved: with
            ``load_state_dict()``, or random number generators.

        Returns
        -------
        dict or None
            The states that are neither in `objects` nor in `skip`, by name, and "step"; None if
            there is no checkpoint and no `step` was given.

        Raises
        ------
        CheckpointError
            On every rank, if the checkpoint does not exist or is damaged, has no state of a given
            name, or has a state saved per rank or stage for another number of ranks or stages; and
            if an object raises something on some ranks, or an argument is invalid on some.
        InvalidArgument
            If an argument is invalid on every rank, or the state of a ZeroOptimizer is for another
            object.  What an object raises on every rank is raised as it is.
        """
        rank, size = self._comm.rank, self._comm.size
        skipped: set[str] = set()

        def find() -> tuple[Path, Manifest] | None:
            if step is not None:
                whole("step", step, 0, f"rank {rank}: ", ", or None for the highest")
            for name, value in objects.items():
                loads = callable(getattr(value, "load_state_dict", None))
                if not loads and source_of(value) is None:
                    raise InvalidArgument(
                        f"rank {rank}: load: {name} has type {type(value).__name__}: expected an "
                        "object with load_state_dict(), or a random number generator; other states "
                        "are returned by load()"
                    )
            names = _names(skip)
            if names is None:
                raise InvalidArgument(f"rank {rank}: load: skip={skip!r}: expected names of states")
            if names & set(objects):
                raise InvalidArgument(
                    f"rank {rank}: load: skip={skip!r}: {', '.join(sorted(names & set(objects)))} "
                    "is also given as an object to load"
                )
            skipped.update(names)
            path = None if rank else self._find(step)
            return None if path is None else (path, Manifest.load(path))

        # Three rounds: what rank 0 found, before all check it; and all of it, before an object is
        # changed, since one that is restored by half is of no use; and that all are restored.
        found = self._agree("load", find, alike=True, first=True)[0]
        if found is None:
            return None
        path, manifest = found
        wanted = [name for name in manifest.trees if name not in skipped]

        def check() -> dict[str, int | None]:
            missing = sorted({*objects, *skipped} - set(manifest.trees))
            if missing:
                raise CheckpointError(
                    f"{path} has no {', '.join(missing)}: it has {', '.join(manifest.trees)}"
                )
            keys = {name: self._mine(name, manifest.divided.get(name)) for name in wanted}
            # Each rank a share: in all, every byte is checked once.
            mine = manifest.segments()[rank::size]
            wrong = damaged(path, mine, manifest.itemsizes())
            if wrong:
                raise CheckpointError(f"{wrong}; checkpoints exist for steps {self.steps()}")
            return keys

        keys = self._agree("load", check)[rank]
        loaded: dict[str, Any] = {}

        def restore() -> None:
            for name, value in objects.items():
                source = source_of(value)
                state = manifest.state(
                    name, path, not getattr(value, "takes_parts", False), keys[name]
                )
                if is_zero_state(state) and not getattr(value, "takes_slices", False):
                    raise InvalidArgument(
                        f"rank {rank}: load: {name} was saved from a ZeroOptimizer in slices: load "
                        "it into a ZeroOptimizer (on any number of ranks), not a "
                        f"{type(value).__name__}"
                    )
                if source is None:
                    value.load_state_dict(state)
                else:
                    source.set_state(state)
            for name in wanted:
                if name not in objects:
                    loaded[name] = manifest.state(name, path, True, keys[name])

        self._agree("load", restore, alike=True)
        return {**loaded, "step": manifest.step}

    def _mine(self, name: str, divided: tuple[str, int] | None) -> int | None:
        """Return which part of the saved state `name` is this process's: its rank, or its stage.

        None if all ranks share the state.  `divided` is what :meth:`_division` returned at the
        save; CheckpointError if the number of ranks or stages was another one.
        """
        if divided is None:
            return None
        by, count = divided
        there = self._grid.shape[1] if by == "stage" and self._grid else self._comm.size
        saved = f"{name} was saved per {by}, for {count} {by}s"
        if by == "stage" and self._grid is None:
            raise CheckpointError(
                f"{saved}: expected Checkpoint(folder, grid), with a grid of {count} stages"
            )
        if count != there:
            raise CheckpointError(
                f"{saved}, but this job has {there}: load(…, skip=[{name!r}]) loads the rest"
            )
        return self._key(by)

    def _find(self, step: int | None) -> Path | None:
        try:
            there = sorted(self._found())
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from error
        wanted = [path for other, _, path in there if step is None or other == step]
        if step is not None and not wanted:
            raise CheckpointError(f"no checkpoint of step {step}: expected one of {self.steps()}")
        return wanted[-1] if wanted else None

    def _found(self) -> list[tuple[int, int, Path]]:
        """Return the step, generation and path of each complete checkpoint, in any order.

        Saving a step again makes a new generation, a number from 0.
        """
        try:
            entries = list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        named = [(path, _NAME.fullmatch(path.name)) for path in entries]
        return [(int(name[1]), int(name[2]), path) for path, name in named if name]

    def _agree(
        self, what: str, act: Callable[[], Any], alike: bool = False, first: bool = False
    ) -> list[Any]:
        """Call `act` on every rank and return the results of all ranks, in order; collective.

        If it raises on any rank, CheckpointError is raised on every rank; `what` begins the
        message.  With `alike`, an error of the same class on every rank is raised as it is.
        `first` is whether other ranks may be in another call than this one's.
        """
        found = answers(
            self._comm, act, lambda mine: self._exchange(mine, not first or bool(mine[1]))
        )
        own, size = found.own, self._comm.size
        kinds = {text.partition(":")[0] for text in found.errors.values()}
        every = len(found.errors) == size and len(kinds) == 1
        if alike and own is not None and every and not isinstance(own, CheckpointError):
            raise own
        if found.errors:
            cause = None if isinstance(own, MpidistError) else own  # that says it all
            told = f"rank {self._comm.rank}: {what}: {found.told()}"
            raise CheckpointError(told) from cause
        return found.values

    def _exchange(self, mine: tuple[Any, str], again: bool) -> list[tuple[Any, str]]:
        """Return what the ranks tell each other; collective.

        A state of the user may call collectives itself.  Where it does not on some ranks, or raises
        before, this call meets that one: both are refused, and all ranks come here `again`.
        """
        try:
            return self._comm.allgather_object(mine)
        except CollectiveMismatch:
            if not again:
                raise
            return self._comm.allgather_object(mine)


def _names(given: Any) -> set[str] | None:
    """Return one name or several as a set; None if they are no names."""
    try:
        return {given} if isinstance(given, str) else set(given)
    except TypeError:
        return None


def _compare(
    trees: list[dict[str, str]], tables: list[dict[str, Entry]]
) -> tuple[dict[str, Any], str]:
    """Join the ranks' states; return the joined JSON trees by name, and an error message.

    The message is "" if all states agree.  `trees` has each rank's trees as JSON text, by name;
    `tables` each rank's arrays as :func:`_entry` describes them, by path, such as
    "model/0.weight".
    """
    wrong: dict[str, str] = {}

    def unlike(path: str, ranks: Sequence[int]) -> None:
        wrong.setdefault(path, f"{path} differs on rank {', '.join(map(str, ranks))}")

    joined = {}
    for name in trees[0]:
        # Mostly the JSON is equal on all ranks: one tree then stands for all.
        alike = all(other[name] == trees[0][name] for other in trees)
        chosen = trees[:1] if alike else trees
        of_ranks = {rank: json.loads(other[name]) for rank, other in enumerate(chosen)}
        joined[name] = merge(of_ranks, name, unlike)
    held: dict[str, dict[int, Entry]] = {}
    for rank, table in enumerate(tables):
        for path, entry in table.items():
            held.setdefault(path, {})[rank] = entry
    for path, entries in held.items():
        text = _unlike(path, entries)
        if text:
            wrong.setdefault(path, text)
    if not wrong:
        return joined, ""
    texts = list(wrong.values())
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    names = sorted({path.partition("/")[0] for path in wrong})
    return joined, (
        f"not the same on all ranks: {'; '.join(texts[:_SHOWN])}{more}. Declare what differs: "
        f"save(…, per_rank={names}); pass a Pipeline itself, not its modules; use "
        "Checkpoint(folder, grid) for the stages of a grid"
    )


def _entry(leaf: Leaf, shared: bool) -> Entry:
    """Return the description of a rank's array, or slice of one, that ranks compare.

    It has dtype, shape, whether the array is whole, the first element and the number of elements
    that the rank has, and a digest: None for a slice, and if the ranks' arrays need not be equal
    (not `shared`, or marked as :class:`MayDiffer`).
    """
    values = digest(leaf.flat) if shared and leaf.whole and not leaf.may_differ else None
    return dtype_name(leaf.flat.dtype), leaf.shape, leaf.whole, leaf.start, leaf.flat.size, values


def _unlike(path: str, entries: Mapping[int, Entry]) -> str:
    """Return as text how the ranks' descriptions of one array differ; "" if they agree.

    `entries` has the results of :func:`_entry` by rank.  Slices agree if they make up the array.
    """
    lowest = min(entries)
    dtype, shape, whole, *_ = first = entries[lowest]
    if whole and all(entry == first for entry in entries.values()):
        return ""
    for rank, (other, there, *_) in entries.items():
        if (other, there) != (dtype, shape):
            return f"{path} is {other} {there} on rank {rank} and {dtype} {shape} on rank {lowest}"
    others = [rank for rank, e in entries.items() if e[2] != whole or (whole and e != first)]
    if others:
        return f"{path} differs on rank {', '.join(map(str, others))}"
    stop = 0
    for start, count in sorted((entry[3], entry[4]) for entry in entries.values() if entry[4]):
        if start != stop:
            break
        stop += count
    if stop == math.prod(shape):
        return ""
    return (
        f"{path}: the parts on ranks {', '.join(map(str, entries))} do not add up to the whole "
        "array"
    )


def _join(
    tables: list[dict[str, Any]], written: list[dict[str, list[Segment]]]
) -> dict[str, tuple[str, tuple[int, ...], tuple[Segment, ...]]]:
    """Return dtype, shape and all segments of each array, by path, for the manifest.

    `tables` has each rank's arrays as :func:`_entry` describes them, `written` the segments that
    each rank wrote, both by path.
    """
    joined = {}
    for path, (dtype, shape, *_) in {p: t for table in tables for p, t in table.items()}.items():
        segments = [segment for shares in written for segment in shares.get(path, ())]
        joined[path] = (dtype, shape, tuple(sorted(segments, key=lambda s: s.start)))
    return joined
