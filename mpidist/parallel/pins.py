"""The algorithm of each bucket, chosen once: a change between steps would change bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import Unsupported
from ..schedule.registry import EXECUTORS, find

UNSTEADY = ("native", "staged", "single_copy")
"""Ways that "auto" leaves out here: MPI does not promise equal bits on every rank, and the others
serve no call in the background."""


def choose_algorithms(
    comm: Any, nbytes: Sequence[int], asked: str, symmetric: bool, collective: str
) -> list[str]:
    """Choose an algorithm for each size in bytes, on rank 0, for all ranks; collective.

    The precedence is that of a communicator; what the call or the configuration asks for by name is
    taken even if it is native.

    Raises
    ------
    UnknownName
        If `asked` is neither "auto" nor an algorithm.
    """
    if asked != "auto":
        if asked not in EXECUTORS:
            find(collective, asked)
        return [asked] * len(nbytes)
    memory = "symmetric" if symmetric else "private"

    def name(size: int) -> str:
        try:
            return comm.explain(collective, size, "mean", memory, without=UNSTEADY)[0].name
        except Unsupported:  # the configuration asks for one of those
            return comm.explain(collective, size, "mean", memory)[0].name

    return comm.broadcast_object([name(size) for size in nbytes] if comm.rank == 0 else None)


def allocate(comm: Any, count: int, dtype: Any) -> Any:
    """Make a flat array in symmetric memory, or give None where there is none; collective."""
    try:
        return comm.empty(count, dtype)
    except Unsupported:
        return None
