"""The shipped rules: the executor or algorithm measured to be the fastest, by number of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule.registry import NATIVE

STAGING_BYTES = 2 << 20  # size of each of the two slots of a rank
MPICH = "MPICH"  # the vendor's name in mpi4py


@dataclass(frozen=True)
class Rule:
    """A rule: choose `name` below a number of bytes, for some numbers of ranks and nodes.

    Attributes
    ----------
    below : float
        Bytes below which the rule holds; infinity for all.
    name : str
        Name of the executor or algorithm.
    ranks : float
        Largest number of ranks.
    one_node, several_nodes, two_nodes, crowded : bool
        Whether the rule holds only on one node, on two or more, on two, with more ranks than cores.
    """

    below: float
    name: str
    ranks: float = float("inf")
    one_node: bool = False
    several_nodes: bool = False
    two_nodes: bool = False
    crowded: bool = False  # only with more ranks than cores

    @property
    def between_nodes(self) -> bool:
        """Whether the rule chooses a hierarchical algorithm, for ranks on several nodes."""
        return (self.several_nodes or self.two_nodes) and self.name != NATIVE

    def holds(self, nbytes: float, size: int, nodes: int, crowded: bool) -> bool:
        """Return whether the rule applies to `nbytes` on `size` ranks of `nodes` nodes.

        `crowded` is whether there are more ranks than cores.
        """
        small = nbytes < self.below or self.below == float("inf")
        if (self.one_node and nodes > 1) or (self.several_nodes and nodes == 1):
            return False
        if self.crowded and not crowded:
            return False
        return small and size <= self.ranks and (nodes == 2 or not self.two_nodes)


_ANY = float("inf")
WITHOUT_NATIVE: dict[str, tuple[Rule, ...]] = {
    "allreduce": (Rule(32 << 10, "recursive_doubling"), Rule(_ANY, "ring")),
    "reduce": (Rule(256 << 10, "binomial"), Rule(_ANY, "reduce_scatter_gather")),
    "broadcast": (Rule(512 << 10, "binomial"), Rule(_ANY, "scatter_allgather")),
    "allgather": (Rule(64 << 10, "bruck"), Rule(_ANY, "ring")),
    "reduce_scatter": (Rule(64 << 10, "recursive_halving"), Rule(_ANY, "ring")),
    "gather": (Rule(_ANY, "binomial"),),
    "scatter": (Rule(_ANY, "binomial"),),
    "alltoall": (Rule(4 << 10, "bruck"), Rule(_ANY, "pairwise")),
    "barrier": (Rule(_ANY, "dissemination"),),
}
"""Shipped rules for backends without collectives of their own (Thakur et al. 2005, figures 5–9)."""

_SLICES = 16 << 10  # bytes from which a slice per lane is faster, between nodes


def _between_nodes(
    large: tuple[Rule, ...], small: str = "hierarchical_leaders"
) -> tuple[Rule, ...]:
    return (Rule(_SLICES, small, several_nodes=True), *large)


_LANES = (
    Rule(_ANY, "hierarchical", several_nodes=True),
    Rule(_ANY, "hierarchical_leaders", several_nodes=True),
)
WITH_NATIVE: dict[str, tuple[Rule, ...]] = {
    "allreduce": (
        *_between_nodes(
            (Rule(_ANY, "hierarchical/direct/recursive_doubling", two_nodes=True), *_LANES),
            "hierarchical_leaders/binomial/recursive_doubling",
        ),
        Rule(4 << 20, NATIVE),
        Rule(16 << 20, NATIVE, crowded=True),
        Rule(_ANY, "direct", ranks=16, one_node=True),
        Rule(32 << 20, NATIVE),
        Rule(_ANY, "ring"),
    ),
    "reduce": (
        *_between_nodes((Rule(256 << 10, "hierarchical", several_nodes=True),)),
        Rule(_ANY, NATIVE),
    ),
    "broadcast": (*_between_nodes(_LANES), Rule(_ANY, NATIVE)),
    "allgather": (*_between_nodes(_LANES), Rule(_ANY, NATIVE)),
    "reduce_scatter": (*_between_nodes(_LANES), Rule(_ANY, NATIVE)),
    "barrier": (*_between_nodes(()), Rule(_ANY, NATIVE)),
}
"""Shipped rules with a library's collectives: our algorithms only where they measured faster.

On one node, direct took 0.57–0.94 of native's time from 4 MB on (Open MPI 5.0.11 and MPICH 5.0.2, 2
ranks), and from 16 MB on with more ranks than cores (4 on 2; at 4 MB 1.04–1.2 with Open MPI).
Above 32 MB native allreduce maps a full-size temporary in every call, on any nodes.
Between nodes see docs/hierarchical.rst: there a native call with a deadline first waits until all
ranks have arrived, which costs a round trip that our algorithms do not need.
"""


def levels_for(collective: str) -> list[str]:
    """Return the hierarchical algorithms of a collective's rules: names, in the rules' order."""
    rules = WITH_NATIVE.get(collective, ())
    return [r.name for r in rules if r.between_nodes]


Range = tuple[float, float]  # lower bound, inclusive, and upper bound, exclusive, in bytes

WITH_SYMMETRIC: dict[str, tuple[int, int]] = {
    "allreduce": (0, 0),
    "reduce": (0, 0),
    "broadcast": (0, 0),
    "allgather": (0, 0),
    "reduce_scatter": (0, 0),
    "gather": (32 << 10, 128 << 10),
    "scatter": (64 << 10, 128 << 10),
    "alltoall": (0, 0),
    "barrier": (0, 0),
}
"""Arrays in symmetric memory: bytes from which they were faster than native and staged.

The second number is for more ranks than cores, where a deadline costs native most.  Measured with
Open MPI 5.0.11 and MPICH 5.0.2, on 2 and 4 ranks on 2 cores, candidates in a random order in every
iteration; the bytes hold for both libraries.  To keep its deadline, native waits until all ranks
have arrived; in symmetric memory the data are then one read away.  Gather and scatter have two
barriers in symmetric memory, and one in slots.
"""

_SLOT = (2 << 20) + 1
_MEBIBYTE = (1 << 20) + 1
_STAGED: dict[bool, dict[str, int]] = {
    False: {
        "allreduce": 768 << 10,
        "reduce": _SLOT,
        "reduce_scatter": _SLOT,
        "allgather": _SLOT,
        "broadcast": _SLOT,
        "alltoall": 768 << 10,
        "gather": _SLOT,
        "scatter": _SLOT,
    },
    True: {
        "allreduce": _SLOT,
        "reduce": _SLOT,
        "reduce_scatter": _SLOT,
        "allgather": _SLOT,
        "broadcast": _SLOT,
        "alltoall": 768 << 10,
        "gather": _SLOT,
        "scatter": 384 << 10,
    },
}
_STAGED_MPICH: dict[bool, dict[str, int]] = {
    False: {
        "allreduce": _SLOT,
        "reduce": _SLOT,
        "reduce_scatter": _SLOT,
        "allgather": _MEBIBYTE,
        "broadcast": _SLOT,
        "alltoall": 768 << 10,
        "gather": _SLOT,
        "scatter": _SLOT,
    },
    True: {
        "allreduce": _SLOT,
        "reduce": _SLOT,
        "reduce_scatter": _SLOT,
        "allgather": _SLOT,
        "broadcast": _SLOT,
        "alltoall": _MEBIBYTE,
        "gather": _SLOT,
        "scatter": _SLOT,
    },
}
"""Private arrays through slots of shared memory: bytes below which they were faster.

Keys are whether there are more ranks than cores, and the collective; measured as the above.
"""

_ABOVE_A_SLOT: dict[str, Range] = dict.fromkeys(
    ("allreduce", "reduce", "reduce_scatter"), (_SLOT, _ANY)
)
_SINGLE_COPY: dict[bool, dict[str, Range]] = {
    False: {"allreduce": (2 << 20, _ANY), "reduce_scatter": (_SLOT, _ANY)},
    True: _ABOVE_A_SLOT,
}
_SINGLE_COPY_MPICH: dict[bool, dict[str, Range]] = {False: _ABOVE_A_SLOT, True: _ABOVE_A_SLOT}
"""Private arrays by single copy: bytes between which it was faster than native and staged.

Measured as the above, from 1 MB to 64 MB.  Allreduce took 0.44–0.90 of native's time apart and
0.48–1.06 in place (Open MPI at 2 and 4 MB gains nothing there), reduce_scatter 0.20–0.93, reduce
with MPICH 0.24–0.79; with Open MPI on 2 ranks reduce took 1.0–1.5 times as long up to 16 MB, on 4
ranks 0.5–0.8.  MPICH's allreduce on 2 ranks, 1.5 and 2 MiB, on a busy machine: slots took 0.1–0.8
of native's time, and at 2 MiB 0.7–0.8 of single copy's.
"""


def staged_below(collective: str, vendor: str, crowded: bool) -> float:
    """Return the bytes below which ``staged`` is chosen for private arrays; 0 if it never is.

    The executor ``staged`` goes through slots of shared memory; private arrays are those that are
    not in symmetric memory.

    Parameters
    ----------
    collective : str
        Name of the collective.
    vendor : str
        Name of the MPI library, without its version.  MPICH has rules of its own; all other
        libraries have Open MPI's.
    crowded : bool
        Whether there are more ranks than cores.
    """
    tables = _STAGED_MPICH if vendor == MPICH else _STAGED
    return tables[crowded].get(collective, 0)


def single_copy_range(collective: str, vendor: str, crowded: bool) -> Range:
    """Return (from, below): the bytes for which ``single_copy`` is chosen for private arrays.

    They are (0, 0) if it never is.  In the executor ``single_copy`` ranks read each other's private
    arrays, which are not in symmetric memory.  Parameters are those of :func:`staged_below`.
    """
    tables = _SINGLE_COPY_MPICH if vendor == MPICH else _SINGLE_COPY
    return tables[crowded].get(collective, (0, 0))
