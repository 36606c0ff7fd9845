"""Who shares a node with whom, and ranks seen as a grid of data and pipeline parallelism."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, InvalidArgument, InvalidRank, Unsupported


def pretended_hosts(size: int, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Give the hosts that ``MPIDIST_RANKS_PER_NODE`` pretends, or None where it is not set."""
    if not environ.get(RANKS_PER_NODE):
        return None
    topology = Topology.from_hosts(0, range(size), environ)
    return tuple(node for node, group in enumerate(topology.groups) for _ in group)


RANKS_PER_NODE = "MPIDIST_RANKS_PER_NODE"
"""Environment variable: pretend that every so many consecutive ranks share a node."""


@dataclass(frozen=True)
class Topology:
    """The ranks of a communicator by node, as one of them sees it.

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
                f"rank {self.rank}: groups={groups!r}: each rank 0 … p - 1 must be in exactly one"
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
            Where ``MPIDIST_RANKS_PER_NODE=k`` is looked up.  If it is there, `hosts` is ignored and
            every `k` consecutive ranks count as a node (the last may have fewer): hierarchical
            algorithms can so be studied on one machine.

        Raises
        ------
        ConfigError
            If that variable is not a number > 0.
        """
        pretended = environ.get(RANKS_PER_NODE, "").strip()
        if pretended:
            if not pretended.isdigit() or int(pretended) == 0:
                raise ConfigError(
                    f"rank {rank}: {RANKS_PER_NODE}={pretended!r}: allowed are whole numbers > 0"
                )
            hosts = [r // int(pretended) for r in range(len(hosts))]
        nodes: dict[Hashable, list[int]] = {}
        for r, host in enumerate(hosts):
            nodes.setdefault(host, []).append(r)
        return cls(rank, tuple(map(tuple, nodes.values())))

    def restrict(self, ranks: Iterable[int]) -> Topology:
        """Give the topology of a sub-communicator.

        Parameters
        ----------
        ranks : iterable of int
            The members in the order of their new ranks; this rank must be one of them.

        Returns
        -------
        Topology
            In the new numbering.  Nodes stay what they are, pretended ones too.
        """
        members = list(ranks)
        if self.rank not in members:
            raise InvalidArgument(f"rank {self.rank}: ranks={members!r} must hold this rank")
        node_of = {r: number for number, group in enumerate(self.groups) for r in group}
        return Topology.from_hosts(members.index(self.rank), [node_of[r] for r in members], {})

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
        """Index in `groups` of the node that this rank is on."""
        return next(i for i, group in enumerate(self.groups) if self.rank in group)

    @property
    def node(self) -> tuple[int, ...]:
        """The ranks on this rank's node, itself among them."""
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
                f"rank {self.rank}: lanes need equally many ranks on every node, there are {sizes}"
            )
        return tuple(zip(*self.groups, strict=True))


class Grid:
    """Ranks as a rectangle: `pipe` stages, each of them replicated over `data` ranks.

    Rank ``r`` holds stage ``r // data`` and replica ``r % data``: replicas of a stage are
    neighbours, as their allreduce moves more than a pipeline's activations and belongs in a node.

    Parameters
    ----------
    comm : Communicator
        Is split twice (collective: every rank must construct the grid).
    data, pipe : int, optional
        Their product must be ``comm.size``; one of them may be left out (or -1) to be worked out.

    Attributes
    ----------
    comm : Communicator
        The whole grid.
    shape : tuple of int
        ``(data, pipe)``.
    data, pipe : Communicator
        The ranks that hold the same stage; the ranks that hold the same replica, by stage.
    data_index, pipe_index : int
        This rank's replica and stage: its ranks in `data` and `pipe`.
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
            raise ConfigError(f"{given}: allowed are whole numbers > 0, and None or -1 for one")
    if sides == [None, None]:
        raise ConfigError(f"{given}: at least one of data and pipe must be given")
    known = (sides[0] or 1) * (sides[1] or 1)
    if None in sides:
        if size % known:
            raise ConfigError(f"{given}: {size} is not a multiple of {known}")
        sides[sides.index(None)] = size // known
    elif known != size:
        raise ConfigError(f"{given}: data * pipe = {known} must be {size}")
    return sides[0] or 1, sides[1] or 1
