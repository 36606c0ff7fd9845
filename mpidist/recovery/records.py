"""The records that one start of a job leaves for the next: vaults in a folder of the node."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError, MpidistError
from .vault import SLOTS, Reader, Record, Vault

_MARK = "mpidist records: "
VAULTS, RESTART = "MPIDIST_VAULTS", "MPIDIST_RESTART"
_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)-of-(\d+)(?:-by-(\d+))?\.mpidist-vault-0")


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

    def files(self, folder: Path, rank: int, by: int | None = None) -> list[str]:
        """Return the paths of a rank's slots; of those that the rank `by` of another node keeps."""
        name = f"{self.training}.{self.start}.{self.generation}.{rank}-of-{self.size}"
        name += "" if by is None else f"-by-{by}"
        return [str(folder / f"{name}.mpidist-vault-{slot}") for slot in range(SLOTS)]

    def vault(self, folder: Path, rank: int, by: int | None = None) -> Vault:
        """Return a new vault of a rank; what a begin that was left has made is replaced."""
        files, flags = [], os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for name in self.files(folder, rank, by):
            with suppress(FileNotFoundError):
                os.unlink(name)
            files.append(os.open(name, flags, 0o600))
        return Vault(files)


Steps = Mapping[int, Mapping[int, Record]]
"""The records that there are, by rank and step."""
Offer = Mapping[Ranks, Steps]
"""The records that can be read in one place, by their ranks."""


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
    newest_of: dict[tuple[Ranks, int], int] = {}
    for name in sorted(os.listdir(folder), key=lambda name: ("-by-" in name, name)):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        number, start, generation, rank, size = map(int, match.groups()[:5])
        ranks, by = Ranks(number, start, generation, size), int(match[6]) if match[6] else None
        files = ranks.files(folder, rank, by)
        if training in (None, number) and all(map(os.path.exists, files)):
            reader = Reader.open(files, rank)
            step = max(reader.steps(), default=-1)
            # A begin that was left may have had a rank's records in another place.
            if newest_of.get((ranks, rank), -2) < step:
                newest_of[ranks, rank] = step
                groups.setdefault(ranks, {})[rank] = reader
    return groups


def offered(groups: Mapping[Ranks, Mapping[int, Reader]]) -> Offer:
    """Return what there is of the result of :func:`found`."""
    return {
        ranks: {rank: reader.steps() for rank, reader in readers.items()}
        for ranks, readers in groups.items()
    }


def complete(steps: Sequence[Steps], size: int) -> dict[int, dict[int, Record]]:
    """Return the records of each step that can be restored, by step and rank.

    Each of `steps` is what can be read in one place.  Of such a step each of `size` ranks has left
    its record, here or there, or the head of it on another node; if there is none, as too many
    nodes are lost, it is one of which all ranks of another node have, as long as no object is
    another one on each rank.
    """
    there: dict[int, dict[int, Record]] = {}
    for each in steps:
        for rank, found in each.items():
            for step, record in found.items():
                known = there.setdefault(step, {})
                if rank not in known or known[rank].guest:
                    known[rank] = record
    whole = {
        step: records
        for step, records in there.items()
        if len(records) == size
        and (in_shares(records) or not all(r.shares or r.guest for r in records.values()))
    }
    return whole or {
        step: records
        for step, records in there.items()
        if in_shares(records) and not any(record.alone for record in records.values())
    }


def in_shares(records: Mapping[int, Record]) -> list[int]:
    """Return ranks whose shares, in their order, are all that the ranks have alike; [] if none."""
    for count in sorted({record.shares for record in records.values()} - {0}):
        holders = {r.share: rank for rank, r in records.items() if r.shares == count}
        if len(holders) == count:
            return [holders[share] for share in range(count)]
    return []


def missing(steps: Sequence[Steps], size: int) -> str:
    """Return why no step is complete."""
    gone = [r for r in range(size) if not any(each.get(r) for each in steps)]
    return f"that of rank {gone[0]} is gone" if gone else "they are too far apart"


def newest(offers: Sequence[Offer]) -> tuple[Ranks, int] | None:
    """Return the last ranks of which a step is complete, and that step; None if there are none."""
    there = []
    for ranks in {ranks for offer in offers for ranks in offer}:
        steps = complete([offer.get(ranks, {}) for offer in offers], ranks.size)
        there += [(len(steps[max(steps)]) == ranks.size, ranks, max(steps))] if steps else []

    # Where a rank was lost within a begin, another one of the same generation followed on fewer
    # ranks: whichever has come further counts.  Records of all ranks count more than those of a
    # node: a start that has ended in its begin may have left them on one node only.
    def order(found: tuple[bool, Ranks, int]) -> tuple[int, ...]:
        whole, ranks, step = found
        return ranks.training, whole, ranks.start, ranks.generation, step, -ranks.size

    return max(there, key=order)[1:] if there else None


def last_step(offers: Sequence[Offer]) -> tuple[int, int] | None:
    """Return the training and its step from which the next start continues, None if there is none.

    A step of a later training is a later one.
    """
    last = max((ranks.training for offer in offers for ranks in offer), default=0)
    of_last = [{r: steps for r, steps in offer.items() if r.training == last} for offer in offers]
    there = newest(of_last)
    return None if there is None else (last, there[1])


def as_text(offer: Offer) -> str:
    """Return what there is on a node as a line of text, for ``mpidist run``."""
    rows = [
        (*ranks, rank, step, *record)
        for ranks, steps in offer.items()
        for rank, records in steps.items()
        for step, record in records.items()
    ]
    return f"{_MARK}{json.dumps(rows)}"


def from_text(text: str) -> Offer | None:
    """Return the result of :func:`as_text` among other lines; None if it is not there."""
    line = next((line for line in text.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        return None
    offer: dict[Ranks, dict[int, dict[int, Record]]] = {}
    for training, start, generation, size, rank, step, *record in json.loads(line[len(_MARK) :]):
        steps = offer.setdefault(Ranks(training, start, generation, size), {})
        steps.setdefault(rank, {})[step] = Record(*record)
    return offer


def tell(folder: Path) -> None:
    """Print what there is in a folder of this node; nothing if it cannot be read."""
    offer: Offer = {}
    try:
        offer = offered(found(folder)) if folder.is_dir() else {}
    except (MpidistError, OSError) as error:  # the node is not down, for all that
        sys.stderr.write(f"mpidist: the records in {folder} cannot be read: {error}\n")
    sys.stdout.write(f"{as_text(offer)}\n")


def before(folder: Path, ranks: Ranks) -> list[Path]:
    """Return the records of a training's earlier ranks."""
    found = []
    for name in os.listdir(folder):
        training, begun, generation = map(int, name.split(".")[:3])
        if training == ranks.training and (begun, generation) < (ranks.start, ranks.generation):
            found.append(folder / name)
    return found


def held(files: Iterable[Path]) -> int:
    """Return the bytes that files take; none those that another rank has removed."""
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += 512 * file.stat().st_blocks
    return total


def remove_before(folder: Path, ranks: Ranks) -> None:
    """Remove the records of a training's earlier ranks."""
    for file in before(folder, ranks):
        file.unlink(missing_ok=True)  # another rank has been faster


if __name__ == "__main__":
    tell(Path(sys.argv[1]))
