"""What a configuration asks of a collective: which algorithm, on which level, over which nodes."""

from __future__ import annotations

from typing import Any, TypeVar

from .errors import ConfigError
from .strategy import ALLOWED, Strategy

LEVELS = ("local", "global")
# What is played on a level whose strategy is left open while the other level's is given.
OPEN = {
    "allreduce": ("direct", "ring"),
    "reduce": ("direct", "binomial"),
    "broadcast": ("direct", "binomial"),
}
Config = TypeVar("Config", bound="Steering")


class Steering:
    """The decisions of a :class:`~mpidist.config.CollectiveConfig`, which supplies the fields."""

    num_devices: int
    num_nodes: int | None
    local_allreduce: str
    tree_threshold_bytes: int
    tree_arity: int
    given: frozenset[str]

    def __init__(self, **values: Any):
        raise NotImplementedError("the fields come with CollectiveConfig")

    def check_size(self, size: int, rank: int | None = None) -> None:
        """Raise ConfigError if the counts that were given do not make `size` ranks."""
        nodes = self.num_nodes or 1
        who = "" if rank is None else f"rank {rank}: "
        counts = f"num_devices={self.num_devices}, num_nodes={self.num_nodes}"
        if "num_devices" in self.given and self.num_devices * nodes != size:
            needed = self.num_devices * nodes
            raise ConfigError(f"{who}{counts} needs {needed} ranks, there are {size}")
        if size % nodes:
            raise ConfigError(f"{who}{counts}: {size} ranks do not divide into {nodes} nodes")

    def groups(self, natural: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Give the ranks by node as the configuration counts them.

        Parameters
        ----------
        natural : tuple of tuple of int
            Ranks by node as they really are (``Topology.groups``).

        Returns
        -------
        tuple of tuple of int
            `natural` if it has `num_nodes` equal nodes or there is one level only; else every
            ``size / num_nodes`` consecutive ranks count as a node.
        """
        size = sum(map(len, natural))
        self.check_size(size)
        each = size // (self.num_nodes or 1)
        fits = len(natural) == self.num_nodes and {*map(len, natural)} == {each}
        if fits or not self.two_level:
            return natural
        return tuple(tuple(range(first, first + each)) for first in range(0, size, each))

    @property
    def two_level(self) -> bool:
        """Whether collectives work inside nodes and between nodes."""
        return self.num_nodes is not None

    def select_allreduce(self, nbytes: int, size: int) -> Strategy:
        """Give the allreduce strategy for a buffer: the original's rule.

        Parameters
        ----------
        nbytes : int
            Size of the whole buffer in bytes.
        size : int
            Number of ranks.

        Returns
        -------
        Strategy
            `local_allreduce` if that is not auto; else a tree for buffers below the threshold or
            fewer than 4 ranks, and a ring for the others.
        """
        if self.local_allreduce != "auto":
            return Strategy(self.local_allreduce)
        if nbytes < self.tree_threshold_bytes or size < 4:
            return Strategy.tree(self.tree_arity)
        return Strategy("ring")

    def steering(self, collective: str, nbytes: int, size: int) -> str | None:
        """Give the algorithm that the user's settings ask for on a single level.

        Parameters
        ----------
        collective : str
            Any collective; only allreduce, reduce and broadcast can be configured.
        nbytes, size : int
            Bytes of the whole buffer, and number of ranks.

        Returns
        -------
        str or None
            ``"ring"``, ``"tree:k"`` or ``"linear"``; None where nothing that was set speaks about
            this collective.  A strategy other than auto decides.  Otherwise, with a threshold or an
            arity set, allreduce follows :meth:`select_allreduce`; with an arity set, reduce and
            broadcast take that tree below the threshold (above it the original names no rival of
            the tree, so the choice stays open).
        """
        if collective not in ALLOWED:
            return None
        strategy = Strategy(getattr(self, f"local_{collective}"))
        if strategy != "auto":
            return strategy.algorithm(self.tree_arity)
        if collective == "allreduce":
            if self.given & {"tree_threshold_bytes", "tree_arity"}:
                return self.select_allreduce(nbytes, size).algorithm(self.tree_arity)
        elif "tree_arity" in self.given and nbytes < self.tree_threshold_bytes:
            return f"tree:{self.tree_arity}"
        return None

    def asked(self, collective: str, nbytes: int, size: int, commutes: bool = True) -> str | None:
        """Give the algorithm that the user's settings ask for, on one level or two.

        Parameters
        ----------
        collective, nbytes, size
            As of :meth:`steering`.
        commutes : bool
            Whether the operation does.  One that does not is served on a single level: the ranks of
            a node need not follow each other.
        """
        if not self.given:  # defaults ask for nothing
            return None
        if self.two_level and collective in OPEN and commutes:
            return self.both_levels(collective, nbytes, size)
        return self.steering(collective, nbytes, size)

    def both_levels(self, collective: str, nbytes: int, size: int) -> str | None:
        """Give the two-level algorithm that the strategies of both levels make up.

        Parameters
        ----------
        collective : {"allreduce", "reduce", "broadcast"}
            What is to be served.
        nbytes, size : int
            Bytes of the whole buffer, and number of ranks on all nodes.

        Returns
        -------
        str or None
            ``"hierarchical/LOCAL/GLOBAL"`` where every local rank carries a slice between the nodes
            (a ring in the node, or left open), ``"hierarchical_leaders/…"`` where a root gathers in
            the node (a tree, centralized); None where both levels are left open.
        """
        nodes = self.num_nodes or 1
        local = self.level(collective, "local", nbytes, size // nodes)
        across = self.level(collective, "global", nbytes, nodes)
        if local == across == "auto":
            return None
        kind = "hierarchical" if local in ("auto", "ring") else "hierarchical_leaders"
        parts = (p if p != "auto" else o for p, o in zip((local, across), OPEN[collective]))
        return "/".join((kind, *parts))

    def at_level(self: Config, which: str) -> Config:
        """Give the single-level configuration inside the nodes or between them.

        Parameters
        ----------
        which : {"local", "global"}
            The level; the result is for a sub-communicator that holds the ranks of that level.
        """
        if which not in LEVELS:
            raise ConfigError(f"level {which!r}: allowed are {' and '.join(LEVELS)}")
        kept = {n: getattr(self, n) for n in self.given if n.startswith(("tree", "timeout"))}
        for collective in ALLOWED:
            name = f"{which}_{collective}"
            if name in self.given and getattr(self, name) is not None:
                kept[f"local_{collective}"] = getattr(self, name)
        return type(self)(**kept)

    def level(self, collective: str, which: str, nbytes: int, size: int) -> str:
        """Give the algorithm for one of two levels, ``"auto"`` where the user leaves it open.

        Parameters
        ----------
        collective : str
            The collective that runs on that level.
        which : {"local", "global"}
            Inside the nodes or between them.
        nbytes, size : int
            Bytes, and number of ranks on that level.
        """
        return self.at_level(which).steering(collective, nbytes, size) or "auto"
