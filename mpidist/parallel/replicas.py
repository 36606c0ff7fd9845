"""Comparison of replicas: which ranks have other values than the rest, and their repair."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..communicator.communicator import Communicator
from ..errors import ReplicasDiffer
from ..frameworks.base import Framework
from ..gpu.digests import digests
from ..measure import plural
from ..shared_memory.digest import SUMS, digest
from .buffers import broadcast
from .consistency import Named

log = logging.getLogger("mpidist")

REPAIRS, AMONG = 3, 1000
"""A rank with so many faults among so many comparisons has more than a stray flipped bit."""

_LARGEST = (1 << 64) - 1  # what x and ~x add up to
_TOLD = 8  # most ranks whose hosts a message names


def compare(comm: Communicator, framework: Framework, named: Named) -> dict[str, np.ndarray]:
    """Compare parameters of all ranks by their digests; collective.

    Return, for each one that differs, by its name, the lowest rank with the same values as each
    rank; equal on all ranks, and empty if none differs.
    """
    mine = _digests(framework, [p for _, p in named])
    # One small allreduce unless something differs: the largest x and ~x show whether all are equal.
    # Without numpy, whose code has left the cache since the last step.
    total = digest(mine)
    both = np.array([*total, *(_LARGEST - x for x in total)], np.uint64)
    most = comm.allreduce(both, op="max", out=both).tolist()
    if all(x + y == _LARGEST for x, y in zip(most[:SUMS], most[SUMS:], strict=True)):
        return {}
    every = comm.allgather(mine[None])
    like = {}
    for k in np.flatnonzero((every != every[0]).any(axis=(0, 2))).tolist():
        _, first, group = np.unique(every[:, k], axis=0, return_index=True, return_inverse=True)
        like[named[k][0]] = first[group.reshape(-1)]
    return like


def _digests(framework: Framework, parameters: Sequence[Any]) -> np.ndarray:
    """Return the digest of each parameter, of shape (n, SUMS), computed where the parameter is."""
    if all(framework.stream(p) is None for p in parameters):
        return np.array([framework.digest(p) for p in parameters], np.uint64).reshape(-1, SUMS)
    there = [k for k, p in enumerate(parameters) if framework.stream(p) is not None]
    # Together, as the host waits for the GPU once.
    found = dict(zip(there, digests([framework.values(parameters[k]) for k in there]), strict=True))
    every = [found[k] if k in found else framework.digest(p) for k, p in enumerate(parameters)]
    return np.array(every, np.uint64)


def unlike(like: Mapping[str, np.ndarray], roots: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the ranks that differ from a rank, by array, from a result of :func:`compare`.

    `roots` has that rank by array; it is rank 0 for those that are not in it.
    """
    return {
        name: np.flatnonzero(group != group[roots.get(name, 0)]).tolist()
        for name, group in like.items()
    }


def majority(group: np.ndarray) -> int | None:
    """Return the lowest of the ranks that are alike if they are more than half; else None."""
    counts = np.bincount(group)
    return int(counts.argmax()) if 2 * counts.max() > group.size else None


def describe_unlike(unlike: Mapping[str, Sequence[int]], most: int = 5) -> str:
    """Return arrays and their ranks as text, naming at most `most` arrays."""
    lines = [
        f"{name} on {plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"
        for name, ranks in unlike.items()
    ]
    more = len(lines) - most
    return "; ".join(lines[:most]) + (f"; and {more} more" if more > 0 else "")


class ReplicaCheck:
    """Compares the replicas of a model in every `every`-th averaging; then repairs them or raises.

    With `every` 0 it never compares.  What happens to replicas that differ is `differing`, "raise"
    or "majority": an error; or the values that more than half of the ranks share are copied to the
    others, with an error only where no values have that majority, or a rank differs for the third
    time among 1,000 comparisons.  `repaired` counts the comparisons that ended with a repair.
    """

    HOW = ("raise", "majority")

    def __init__(self, comm: Communicator, framework: Framework, every: int, differing: str):
        self._comm, self._framework, self._every = comm, framework, every
        self._may_repair = differing == "majority"
        self._compared = self.repaired = 0
        self._faults: dict[int, list[int]] = {}  # by rank, the comparisons that repaired it

    def is_due(self, number: int) -> bool:
        """Return whether averaging `number`, from 1 on, ends with a comparison."""
        return self._every > 0 and number % self._every == 0

    def run(self, number: int, named: Named) -> None:
        """Compare parameters of all ranks in averaging `number`; collective.

        If they differ, repair them, with a warning by rank 0; or raise ReplicasDiffer on every
        rank, with the arrays, ranks and hosts.
        """
        self._compared += 1
        like = compare(self._comm, self._framework, named)
        if not like:
            return
        # From here on every rank has the same facts, and decides alike.
        every = self._comm.allgather_object(socket.gethostname())
        roots = {
            name: root for name, group in like.items() if (root := majority(group)) is not None
        }
        common = len(roots) == len(like)
        odd = unlike(like, roots if common else {})
        ranks = sorted({rank for ranks in odd.values() for rank in ranks})
        hosts = [
            f"rank {rank} runs on {every[rank]}" for rank in (ranks if common else [0, *ranks])
        ]
        more = ", …" if len(hosts) > _TOLD else ""
        what = (
            f"sync_gradients() number {number}: parameters differ from those of "
            f"{'most ranks' if common else 'rank 0'}: {describe_unlike(odd)}; "
            f"{', '.join(hosts[:_TOLD])}{more}"
        )
        why = "an optimizer step was skipped or differs there, or parameters were changed"
        again: list[int] = []
        if self._may_repair and not common:
            why = "no values are those of more than half of the ranks"
        elif self._may_repair:
            again = self._count_faults(ranks)
            if not again:
                self._repair(named, roots, what)
                return
            why = (
                f"rank {', '.join(map(str, again))} for the {REPAIRS}rd time among {AMONG:,} "
                "comparisons: its memory, its processor or the state of its optimizer is at fault"
            )
        raise ReplicasDiffer(
            f"rank {self._comm.rank}: {what}; {why}; broadcast_parameters() makes them equal",
            at_fault=self._comm.rank in again,
            another_is=bool(set(again) - {self._comm.rank}),
        )

    def _repair(self, named: Named, roots: Mapping[str, int], what: str) -> None:
        """Copy each parameter of `roots` from its rank there to all ranks; collective."""
        for name, p in named:
            if name in roots:
                broadcast(self._comm, [self._framework.values(p)], roots[name])
        self.repaired += 1
        if self._comm.rank == 0:
            log.warning(
                "%s; they have the values of the others now, but the gradients of this step were "
                "computed with the wrong ones",
                what,
            )

    def _count_faults(self, ranks: Sequence[int]) -> list[int]:
        """Note a fault of each of these ranks; return those that have too many of late."""
        for rank in ranks:
            recent = [n for n in self._faults.get(rank, ()) if n > self._compared - AMONG]
            self._faults[rank] = [*recent, self._compared]
        return [rank for rank in ranks if len(self._faults[rank]) >= REPAIRS]
