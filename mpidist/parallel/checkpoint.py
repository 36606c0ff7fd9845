"""Checkpoints: each rank writes a part; a kill at any moment leaves the last complete one."""

from __future__ import annotations

import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, InvalidArgument, MpidistError
from . import disk
from .dtypes import dtype_name
from .manifest import Manifest
from .stored import Segment, damaged, write_shares
from .tree import Leaf, merge, take_apart
from .wrapper import check_communicator

_NAME = re.compile(r"step-(\d+)\.(\d+)")


class Checkpoint:
    """The checkpoints of a training, in a folder that all ranks see.

    Parameters
    ----------
    folder : path
        Is made if need be.
    comm : Communicator
        The ranks; :meth:`save` and :meth:`load` are collective.
    keep : int
        How many checkpoints stay, > 0; the oldest are removed.

    Notes
    -----
    What is saved are objects with ``state_dict()``, such as models, optimizers and shards, and
    plain states of arrays, numbers, strings, lists, tuples and dicts.  All ranks must have the
    same, apart from a :class:`ZeroOptimizer`, of which each has a part.  Nothing is pickled.

    The files are complete on the disk before their folder gets its name ``step-….0``; the manifest
    holds the SHA-256 of every piece, which :meth:`load` checks.  Waiting for slow ranks is subject
    to the deadline of the communicator.
    """

    def __init__(self, folder: Any, comm: Any, keep: int = 3):
        check_communicator(comm)
        if not isinstance(folder, (str, PathLike)):
            raise InvalidArgument(f"rank {comm.rank}: folder={folder!r}: allowed are paths")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InvalidArgument(f"rank {comm.rank}: keep={keep!r}: allowed are whole numbers > 0")
        self.folder, self.keep, self._comm = Path(folder), keep, comm

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int, **objects: Any) -> Path:
        """Write a checkpoint; give its folder.

        Parameters
        ----------
        step : int
            ≥ 0.  If there is a checkpoint of that step, this one takes its place.
        **objects
            What is saved, by name.

        Raises
        ------
        CheckpointError
            On every rank, if any could not write, or has what cannot be saved.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InvalidArgument(
                f"rank {self._comm.rank}: step={step!r}: allowed are whole numbers >= 0"
            )
        leaves: dict[str, Leaf] = {}
        rank, size = self._comm.rank, self._comm.size

        def gather() -> dict[str, Any]:
            return {
                name: take_apart(_state(value), name, leaves) for name, value in objects.items()
            }

        self._same("save(step, names)", (step, sorted(objects)))
        trees = self._agree("save", gather)
        made = self._agree("save", lambda: rank or disk.make_folder(self.folder, str(step)))[0]
        tables = self._agree("save", lambda: {p: _table(leaf) for p, leaf in leaves.items()})
        for table in tables:
            self._compare(table, tables[0])
        holders = {
            path: [r for r, held in enumerate(tables) if path in held]
            for table in tables
            for path in table
        }
        written = self._agree("save", lambda: write_shares(made, leaves, holders, rank))

        def finish() -> Path | None:
            if rank:
                return None
            joined = {name: merge([tree[name] for tree in trees]) for name in objects}
            manifest = Manifest(step, size, joined, _join(tables, written))
            manifest.save(made)
            return self._publish(step, made)

        return self._agree("save", finish)[0]

    def _publish(self, step: int, made: Path) -> Path:
        """Give the checkpoint its name, then remove those that it replaces."""
        there = self._found()
        newer = [generation for other, generation, _ in there if other == step]
        final = self.folder / f"step-{step:08d}.{max(newer, default=-1) + 1}"
        disk.publish(made, final)
        steps = sorted({other for other, _, _ in there} | {step})
        kept = set(steps[-self.keep :]) | {step}
        for other, _, path in there:
            if other not in kept or other == step:
                disk.remove(path)
        return final

    # -- loading ----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """List the steps of which there are complete checkpoints, ascending."""
        return sorted({step for step, _, _ in self._found()})

    def load(self, step: int | None = None, **objects: Any) -> dict[str, Any] | None:
        """Read a checkpoint; on any number of ranks.

        Parameters
        ----------
        step : int, optional
            Which; by default the last.
        **objects
            What is to take its state, by name, by ``load_state_dict()``.

        Returns
        -------
        dict or None
            The other states that were saved, and "step"; None if there is no checkpoint.

        Raises
        ------
        CheckpointError
            On every rank, if the checkpoint is damaged, or lacks what is asked for.
        """
        rank, size = self._comm.rank, self._comm.size
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise InvalidArgument(
                f"rank {rank}: step={step!r}: allowed are whole numbers >= 0, and None for the last"
            )
        for name, value in objects.items():
            if not callable(getattr(value, "load_state_dict", None)):
                raise InvalidArgument(
                    f"rank {rank}: load: {name} is of {type(value).__name__}: allowed are objects "
                    "with load_state_dict(); load() gives what else there is"
                )
        path = self._agree("load", lambda: None if rank else self._find(step))[0]
        if path is None:
            return None
        manifest = self._agree("load", lambda: None if rank else Manifest.load(path))[0]

        def check() -> None:
            missing = sorted(set(objects) - set(manifest.trees))
            if missing:
                raise CheckpointError(
                    f"{path} has no {', '.join(missing)}, but {', '.join(manifest.trees)}"
                )
            mine = manifest.segments()[rank::size]
            wrong = damaged(path, mine, manifest.itemsizes())
            if wrong:
                raise CheckpointError(f"{wrong}; there are steps {self.steps()}")

        self._agree("load", check)
        for name, value in objects.items():
            value.load_state_dict(
                manifest.state(name, path, not getattr(value, "takes_parts", False))
            )
        others = [name for name in manifest.trees if name not in objects]
        loaded = {name: manifest.state(name, path, True) for name in others}
        return {**loaded, "step": manifest.step}

    def _find(self, step: int | None) -> Path | None:
        there = sorted(self._found())
        wanted = [path for other, _, path in there if step is None or other == step]
        if step is not None and not wanted:
            raise CheckpointError(f"no checkpoint of step {step}: there are {self.steps()}")
        return wanted[-1] if wanted else None

    def _found(self) -> list[tuple[int, int, Path]]:
        """List step, generation and folder of complete checkpoints."""
        try:
            entries = list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        named = [(path, _NAME.fullmatch(path.name)) for path in entries]
        return [(int(name[1]), int(name[2]), path) for path, name in named if name]

    def _same(self, what: str, mine: Any) -> None:
        """Raise CheckpointError on every rank if not all have the same."""
        every = self._comm.allgather_object(mine)
        for rank, other in enumerate(every):
            if other != every[0]:
                raise CheckpointError(
                    f"rank {self._comm.rank}: {what}: rank {rank} has {other} where rank 0 has "
                    f"{every[0]}; all must save the same"
                )

    def _compare(self, table: dict[str, Any], first: dict[str, Any]) -> None:
        """Raise CheckpointError if an array differs in dtype or shape from that of rank 0."""
        for path, found in table.items():
            if found != first.get(path, found):
                raise CheckpointError(
                    f"rank {self._comm.rank}: save: {path} is {found} on a rank and {first[path]} "
                    "on rank 0; all must save the same"
                )

    def _agree(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Do something on every rank; give all results, or raise everywhere if any failed."""
        result, wrong = None, ""
        try:
            result = act()
        except (OSError, MpidistError, MemoryError) as error:
            wrong = f"on rank {self._comm.rank}: {type(error).__name__}: {error}"
        found = self._comm.allgather_object((result, wrong))
        errors = [text for _, text in found if text]
        if errors:
            raise CheckpointError(f"rank {self._comm.rank}: {what}: {'; '.join(errors)}")
        return [value for value, _ in found]


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _table(leaf: Leaf) -> tuple[str, tuple[int, ...]]:
    return dtype_name(leaf.flat.dtype), leaf.shape


def _join(
    tables: list[dict[str, Any]], written: list[dict[str, list[Segment]]]
) -> dict[str, tuple[str, tuple[int, ...], tuple[Segment, ...]]]:
    """Join what all ranks wrote."""
    joined = {}
    for path, (dtype, shape) in {p: t for table in tables for p, t in table.items()}.items():
        segments = [segment for shares in written for segment in shares.get(path, ())]
        joined[path] = (dtype, shape, tuple(sorted(segments, key=lambda s: s.start)))
    return joined
