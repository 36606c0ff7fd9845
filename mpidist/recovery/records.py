"""The records that one start of a job leaves for the next: vaults in a folder of the node."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from .vault import SLOTS, Reader, Vault

VAULTS, RESTART = "MPIDIST_VAULTS", "MPIDIST_RESTART"
_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)-of-(\d+)\.mpidist-vault-0")


class Ranks(NamedTuple):
    """The ranks of one generation; a later one is greater.

    `training` is the number of the call of a function of ``md.elastic``, `start` that of the job.
    """

    training: int
    start: int
    generation: int
    size: int

    def __str__(self) -> str:
        return f"start {self.start + 1}, generation {self.generation}"

    def files(self, folder: Path, rank: int) -> list[str]:
        """Return the paths of a rank's slots."""
        name = f"{self.training}.{self.start}.{self.generation}.{rank}-of-{self.size}"
        return [str(folder / f"{name}.mpidist-vault-{slot}") for slot in range(SLOTS)]

    def vault(self, folder: Path, rank: int) -> Vault:
        """Return a new vault of a rank; what a begin that was left has made is replaced."""
        files, flags = [], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for name in self.files(folder, rank):
            with suppress(FileNotFoundError):
                os.unlink(name)
            files.append(os.open(name, flags, 0o600))
        return Vault(files)


Steps = Mapping[int, Iterable[int]]
"""The steps of which there are records, by rank."""


def folder() -> Path | None:
    """Return the folder of this job's records, None if it has none; LaunchError if it is unsafe."""
    given = os.environ.get(VAULTS, "").strip()
    if not given:
        return None
    try:
        there = os.lstat(given)
        mine = stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid()
        why = "" if mine and not stat.S_IMODE(there.st_mode) & 0o022 else "it is not"
    except OSError as error:
        why = str(error)
    if why:
        raise LaunchError(
            f"{VAULTS}={given!r}: expected a folder of this user, into which nobody else may "
            f"write, as mpidist run --max-restarts makes it: {why}"
        )
    return Path(given)


def start() -> int:
    """Return how often this job was started before."""
    given = os.environ.get(RESTART, "").strip() or "0"
    if not given.isdecimal():
        raise LaunchError(f"{RESTART}={given!r}: expected a whole number >= 0")
    return int(given)


def found(folder: Path, training: int | None = None) -> dict[Ranks, dict[int, Reader]]:
    """Open the vaults in a folder, of one training or of all; by their ranks."""
    groups: dict[Ranks, dict[int, Reader]] = {}
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        number, start, generation, rank, size = map(int, match.groups())
        ranks = Ranks(number, start, generation, size)
        if training in (None, number) and all(map(os.path.exists, ranks.files(folder, rank))):
            reader = Reader.open(ranks.files(folder, rank), rank)
            groups.setdefault(ranks, {})[rank] = reader
    return groups


def complete(steps: Sequence[Steps], size: int) -> set[int]:
    """Return the steps of which every one of `size` ranks has left a record, here or there.

    Each of `steps` is what can be read in one place.
    """
    return set.intersection(*({s for each in steps for s in each.get(r, ())} for r in range(size)))


def missing(steps: Sequence[Steps], size: int) -> str:
    """Return why no step is complete."""
    gone = [r for r in range(size) if not any(any(True for _ in each.get(r, ())) for each in steps)]
    return f"that of rank {gone[0]} is gone" if gone else "they are too far apart"


def newest(offers: Sequence[Mapping[Ranks, Steps]]) -> tuple[Ranks, int] | None:
    """Return the last ranks of which a step is complete, and that step; None if there are none."""
    there = []
    for ranks in {ranks for offer in offers for ranks in offer}:
        steps = complete([offer.get(ranks, {}) for offer in offers], ranks.size)
        there += [(ranks, max(steps))] if steps else []

    # Where a rank was lost within a begin, another one of the same generation followed on fewer
    # ranks: whichever has come further counts.
    def order(found: tuple[Ranks, int]) -> tuple[int, ...]:
        ranks, step = found
        return ranks.training, ranks.start, ranks.generation, step, -ranks.size

    return max(there, key=order, default=None)


def last_step(folder: Path) -> int | None:
    """Return the step from which the next start continues, None if there is none complete."""
    groups = found(folder)
    last = max((ranks.training for ranks in groups), default=0)
    offer = {
        ranks: {rank: reader.steps() for rank, reader in readers.items()}
        for ranks, readers in groups.items()
        if ranks.training == last
    }
    there = newest([offer])
    return None if there is None else there[1]


def remove_before(folder: Path, ranks: Ranks) -> None:
    """Remove the records of a training's earlier ranks."""
    for name in os.listdir(folder):
        training, begun, generation = map(int, name.split(".")[:3])
        if training == ranks.training and (begun, generation) < (ranks.start, ranks.generation):
            with suppress(FileNotFoundError):  # another rank has been faster
                os.unlink(folder / name)
