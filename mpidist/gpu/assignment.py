"""Which GPU a rank works with: by its place among the ranks of its host."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..device import find
from ..errors import Unsupported

Place = tuple[str, str]


def ranks_by_gpu(places: Sequence[Place | None]) -> dict[Place, list[int]]:
    """Group the ranks by the GPU that they work with; those without one are left out.

    Parameters
    ----------
    places : sequence of (str, str) or None
        The host and the UUID of the GPU of every rank.
    """
    owners: dict[Place, list[int]] = {}
    for number, place in enumerate(places):
        if place is not None:
            owners.setdefault(place, []).append(number)
    return owners


def together(place: Place, ranks: Sequence[int]) -> str:
    """Say which ranks are on one GPU."""
    host, gpu = place
    return f"ranks {', '.join(map(str, ranks))} are all on GPU {gpu} of {host}"


def shared_gpus(places: Sequence[Place | None]) -> str | None:
    """Name the ranks of the first GPU that has several, and the GPU, or give None."""
    for place, ranks in ranks_by_gpu(places).items():
        if len(ranks) > 1:
            return together(place, ranks)
    return None


log = logging.getLogger("mpidist")


@dataclass(frozen=True)
class Seen:
    """What one rank sees.

    Attributes
    ----------
    host : str
        Where it is.
    gpus : tuple of str
        UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves it, by their numbers there.
    taken : int or None
        The number of the GPU that it works with already.
    """

    host: str
    gpus: tuple[str, ...]
    taken: int | None = None

    @property
    def place(self) -> Place | None:
        """The host and the UUID of the GPU that it works with."""
        return None if self.taken is None else (self.host, self.gpus[self.taken])


def choose(ranks: Sequence[Seen]) -> list[int]:
    """Give each rank the number of its GPU: of those that it sees, the first that has fewest ranks.

    If all ranks of a host see the same n GPUs, that is the local rank modulo n; if each has been
    given its own, number 0 for all.

    Parameters
    ----------
    ranks : sequence of Seen
        By rank, each of them sees at least one GPU.
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
    """Choose this rank's GPU, unless it has one already, and give its number; collective.

    Raises
    ------
    Unsupported
        On every rank, if one has no GPU.
    """
    reason = find.why_no_device()
    mine = None
    if reason is None:
        mine = Seen(socket.gethostname(), find.visible(), find.taken())
    told = everyone((mine, reason))
    for number, (_, why) in enumerate(told):
        if why is not None:
            raise Unsupported(f"rank {rank}: use_gpu: rank {number} has none: {why}")
    seen = [entry for entry, _ in told]
    number = choose(seen)[rank]
    find.select(number)
    return number


def warn_of_sharing(ranks: Sequence[Seen], rank: int) -> str | None:
    """Say once, on rank 0, which ranks share a GPU by accident: though another has no rank at all.

    Parameters
    ----------
    ranks : sequence of Seen
        With what each has taken.
    rank : int
        This one.

    Returns
    -------
    str or None
        What was said.
    """
    users = ranks_by_gpu([seen.place for seen in ranks])
    for place, several in users.items():
        host, _ = place
        free = [g for r in several for g in ranks[r].gpus if (host, g) not in users]
        if len(several) > 1 and free:
            said = (
                f"{together(place, several)}, and {free[0]} there has no rank: call "
                "comm.use_gpu() before the first array on a GPU, or give each rank its own by "
                "CUDA_VISIBLE_DEVICES (srun --gpus-per-task=1)"
            )
            if rank == 0:
                log.warning("%s", said)
            return said
    return None
