"""Choice of the GPU of each rank, and detection of ranks that share a GPU.

Used by ``comm.use_gpu()``, and by the choice of executors in :mod:`.executors`.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..device import find
from ..errors import Unsupported

GpuPlace = tuple[str, str]
"""The host and the UUID of a GPU."""


def ranks_by_gpu(places: Sequence[GpuPlace | None]) -> dict[GpuPlace, list[int]]:
    """Return the ranks of each GPU; `places` has that of each rank, None for ranks without one."""
    owners: dict[GpuPlace, list[int]] = {}
    for number, place in enumerate(places):
        if place is not None:
            owners.setdefault(place, []).append(number)
    return owners


def describe_shared(place: GpuPlace, ranks: Sequence[int]) -> str:
    """Return the text that says which ranks share a GPU."""
    host, gpu = place
    return f"ranks {', '.join(map(str, ranks))} are all on GPU {gpu} of {host}"


def shared_gpus(places: Sequence[GpuPlace | None]) -> str | None:
    """Return a text with the first GPU that several ranks share, and these ranks; None if none."""
    for place, ranks in ranks_by_gpu(places).items():
        if len(ranks) > 1:
            return describe_shared(place, ranks)
    return None


log = logging.getLogger("mpidist")


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs visible to one rank: UUIDs of those that CUDA_VISIBLE_DEVICES leaves it, by number.

    `taken` is the number of the GPU that the rank uses already; None if it uses none yet.
    """

    host: str
    gpus: tuple[str, ...]
    taken: int | None = None

    @property
    def place(self) -> GpuPlace | None:
        """The host and the UUID of the GPU in use; None if no GPU is in use yet."""
        return None if self.taken is None else (self.host, self.gpus[self.taken])


def choose(ranks: Sequence[VisibleGpus]) -> list[int]:
    """Return the GPU chosen for each rank, as an index in the rank's `gpus`, which are not empty.

    A rank that uses a GPU already keeps it; any other gets the first of those that the fewest ranks
    use.  If no GPU is in use yet and all ranks of a host see the same n GPUs, the index is the
    local rank modulo n; if each rank sees only a GPU of its own, 0.
    """
    users = Counter(seen.place for seen in ranks if seen.place is not None)
    numbers = []
    for seen in ranks:
        number = seen.taken
        if number is None:
            number = min(range(len(seen.gpus)), key=lambda k: users[seen.host, seen.gpus[k]])
            users[seen.host, seen.gpus[number]] += 1
        numbers.append(number)
    return numbers


def use_gpu(rank: int, everyone: Callable[[Any], list[Any]]) -> int:
    """Choose and select this rank's GPU, unless it uses one already; collective.

    ``everyone(value)`` returns the values of all ranks.  The result is the number of the GPU among
    those visible to this rank.  Raises Unsupported on every rank, if one has no GPU.
    """
    reason = find.why_no_device()
    mine = None
    if reason is None:
        mine = VisibleGpus(socket.gethostname(), find.visible(), find.taken())
    entries = everyone((mine, reason))
    for number, (_, why) in enumerate(entries):
        if why is not None:
            raise Unsupported(f"rank {rank}: use_gpu: rank {number} has no GPU: {why}")
    seen = [entry for entry, _ in entries]
    number = choose(seen)[rank]
    find.select(number)
    return number


def warn_of_sharing(ranks: Sequence[VisibleGpus], rank: int) -> str | None:
    """Log a warning on rank 0 if ranks share a GPU although one that they see has no rank.

    Return its text, on every rank; None if there is no reason for one.
    """
    users = ranks_by_gpu([seen.place for seen in ranks])
    for place, several in users.items():
        host, _ = place
        free = [g for r in several for g in ranks[r].gpus if (host, g) not in users]
        if len(several) > 1 and free:
            warning = (
                f"{describe_shared(place, several)}, and {free[0]} there has no rank: call "
                "comm.use_gpu() before the first array on a GPU, or give each rank its own by "
                "CUDA_VISIBLE_DEVICES (srun --gpus-per-task=1)"
            )
            if rank == 0:
                log.warning("%s", warning)
            return warning
    return None
