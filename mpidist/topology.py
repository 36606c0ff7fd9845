"""The nodes of a communicator's ranks, and the grid of data and pipeline parallelism."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, InvalidArgument, InvalidRank, Unsupported


def pretended_hosts(size: int, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return each rank's node number by ``MPIDIST_RANKS_PER_NODE``, or None if it is not set."""
    if not environ.get(RANKS_PER_NODE):
        return None
    topology = Topology.from_hosts(0, range(size), environ)
    return tuple(node for node, group in enumerate(topology.groups) for _ in group)


RANKS_PER_NODE = "MPIDIST_RANKS_PER_NODE"
"""Environment variable with the number of consecutive ranks that pretend to share a node."""


@dataclass(frozen=True)
class Topology:
    """The nodes on which the ranks of a communicator run, and the place of one rank among them.

    Attributes
    ----------
    rank : int
        This rank.
    groups : tuple of tuple of int
        One tuple of ranks (ascending) for each node, in the order of their first ranks.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        groups = tuple(sorted(tuple(sorted(g)) for g in self.groups))
        object.__setattr__(self, "groups", groups)
        ranks = sorted(r for g in groups for r in g)
        if not all(groups) or ranks != list(range(len(ranks))):
            raise InvalidArgument(
                f"rank {self.rank}: groups={groups!r}: expected each of the ranks 0, 1, 2, … in "
                "exactly one group"
            )
        if self.rank not in ranks:
            raise InvalidRank(self.rank, len(ranks))

    @classmethod
    def from_hosts(
        cls, rank: int, hosts: Sequence[Hashable], environ: Mapping[str, str] = os.environ
    ) -> Topology:
        """Group ranks by the host that each one runs on.

        Parameters
        ----------
        rank : int
            This rank.
        hosts : sequence
            ``hosts[r]`` names the host of rank `r`, for example the processor name.
        environ : mapping, optional
            The environment.  If it has ``MPIDIST_RANKS_PER_NODE=k``, `hosts` is ignored and every
            `k` consecutive ranks count as a node (the last may have fewer), so that hierarchical
            algorithms can be studied on one machine.

        Raises
        ------
        ConfigError
            If that variable is not a whole number > 0.
        """
        pretended = environ.get(RANKS_PER_NODE, "").strip()
        if pretended:
            if not pretended.isdecimal() or int(pretended) == 0:
                raise ConfigError(f"{RANKS_PER_NODE}={pretended!r}: expected a whole number > 0")
            hosts = [r // int(pretended) for r in range(len(hosts))]
        nodes: dict[Hashable, list[int]] = {}
        for r, host in enumerate(hosts):
            nodes.setdefault(host, []).append(r)
        return cls(rank, tuple(map(tuple, nodes.values())))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.groups))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.groups)

    @property
    def node_rank(self) -> int:
        """Index in `groups` of this rank's node."""
        return next(i for i, group in enumerate(self.groups) if self.rank in group)

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks on this rank's node, including this rank."""
        return self.groups[self.node_rank]

    @property
    def local_rank(self) -> int:
        """Index of this rank among those on its node."""
        return self.node.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this rank's node."""
        return len(self.node)

    @property
    def is_even(self) -> bool:
        """Whether every node holds the same number of ranks."""
        return len({len(group) for group in self.groups}) == 1

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """For each local rank, the ranks that have it, one per node.

        Raises
        ------
        Unsupported
            If the nodes hold different numbers of ranks.
        """
        if not self.is_even:
            sizes = ", ".join(str(len(group)) for group in self.groups)
            raise Unsupported(
                f"rank {self.rank}: lanes need equally many ranks on every node; the nodes have "
                f"{sizes}"
            )
        return tuple(zip(*self.groups, strict=True))


class Grid:
    """A grid of ranks: `pipe` stages, each of them replicated on `data` ranks.

    Rank ``r`` holds stage ``r // data`` and replica ``r % data``: the replicas of a stage are
    neighbours, preferably on one node, because their allreduce moves more bytes than a pipeline's
    activations.

    Parameters
    ----------
    comm : Communicator
        Communicator of all ranks, which is split twice: every rank must construct the grid.
    data, pipe : int, optional
        Number of replicas and of stages, whose product must be ``comm.size``; one of them may be
        omitted (or -1), and is computed.

    Attributes
    ----------
    comm : Communicator
        The communicator of all ranks of the grid.
    shape : tuple of int
        Number of replicas and of stages.
    data, pipe : Communicator
        Communicator of the ranks that hold this rank's stage, and of the ranks with its replica.
    data_index, pipe_index : int
        This rank's replica and stage, which are its ranks in `data` and `pipe`.
    """

    def __init__(self, comm: Any, *, data: int | None = None, pipe: int | None = None):
        self.comm = comm
        self.shape = _shape(comm.rank, comm.size, data, pipe)
        self.pipe_index, self.data_index = divmod(comm.rank, self.shape[0])
        self.data = comm.split(self.pipe_index, key=self.data_index)
        self.pipe = comm.split(self.data_index, key=self.pipe_index)

    def __repr__(self) -> str:
        data, pipe = self.shape
        return f"Grid(data={data}, pipe={pipe}, at data {self.data_index}, pipe {self.pipe_index})"


def _shape(rank: int, size: int, data: int | None, pipe: int | None) -> tuple[int, int]:
    given = f"rank {rank}: Grid(data={data!r}, pipe={pipe!r}) on {size} ranks"
    sides = [None if side == -1 else side for side in (data, pipe)]
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 1):
            raise ConfigError(f"{given}: expected whole numbers > 0, or None or -1 for one of them")
    if sides == [None, None]:
        raise ConfigError(f"{given}: expected at least one of data and pipe")
    known = (sides[0] or 1) * (sides[1] or 1)
    if None in sides:
        if size % known:
            raise ConfigError(f"{given}: {size} ranks are not a multiple of {known}")
        sides[sides.index(None)] = size // known
    elif known != size:
        raise ConfigError(f"{given}: data * pipe is {known}: expected {size}")
    return sides[0] or 1, sides[1] or 1
