"""The shipped rules: which way is the fastest from how many bytes on, as it was measured."""

from __future__ import annotations

from dataclasses import dataclass

NATIVE = "native"


@dataclass(frozen=True)
class Rule:
    """Below `below` bytes of the whole buffer, on so many ranks and nodes, take `name`."""

    below: float
    name: str
    ranks: float = float("inf")
    one_node: bool = False
    several_nodes: bool = False
    two_nodes: bool = False
    crowded: bool = False  # only with more ranks than cores

    @property
    def between_nodes(self) -> bool:
        """Whether it names an algorithm on two levels."""
        return (self.several_nodes or self.two_nodes) and self.name != NATIVE

    def holds(self, nbytes: float, size: int, nodes: int, crowded: bool) -> bool:
        """Tell whether the rule speaks about such a call."""
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

_SLICES = 16 << 10  # bytes from which a slice for every lane pays, between nodes


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
"""Shipped rules where the library has its own: ours only where it was measured to be faster.

On one node, direct took 0.57–0.94 of native's time from 4 MB on (Open MPI 5.0.11 and MPICH 5.0.2, 2
ranks), and from 16 MB on with more ranks than cores (4 on 2; at 4 MB 1.04–1.2 with Open MPI).
Above 32 MB native allreduce maps a full-size temporary in every call, on any nodes.
Between nodes see docs/hierarchical.rst: there a native call with a deadline first waits until all
have come, which costs a round trip that ours does not need.
"""


def levels_for(collective: str) -> list[str]:
    """List the two-level algorithms that the rules name for a collective between nodes."""
    rules = WITH_NATIVE.get(collective, ())
    return [r.name for r in rules if r.between_nodes]


Range = tuple[float, float]  # from so many bytes, below so many

WITH_SYMMETRIC: dict[str, tuple[int, int]] = {
    "allreduce": (4 << 10, 2 << 10),
    "reduce": (4 << 10, 4 << 10),
    "broadcast": (2 << 10, 2 << 10),
    "allgather": (2 << 10, 1 << 10),
    "reduce_scatter": (2 << 10, 1 << 10),
    "gather": (256 << 10, 512 << 10),
    "scatter": (512 << 10, 512 << 10),
    "alltoall": (2 << 10, 1 << 10),
    "barrier": (0, 0),
}
"""Arrays in symmetric memory: the bytes from which it beat native and staged on both libraries.

The second number is for more ranks than cores, where native with a deadline pays most.  Measured
with Open MPI 5.0.11 and MPICH 5.0.2, on 2 and 4 ranks on 2 cores, contenders in an order drawn for
every iteration.
"""

_SLOT = (2 << 20) + 1
_MEBIBYTE = (1 << 20) + 1
_STAGED: dict[bool, dict[str, Range]] = {
    False: {
        "allreduce": (4 << 10, 768 << 10),
        "reduce": (4 << 10, 768 << 10),
        "reduce_scatter": (4 << 10, _SLOT),
        "allgather": (8 << 10, 768 << 10),
        "broadcast": (4 << 10, 768 << 10),
        "alltoall": (8 << 10, 768 << 10),
        "gather": (8 << 10, 768 << 10),
        "scatter": (2 << 10, _MEBIBYTE),
    },
    True: {
        "allreduce": (8 << 10, _MEBIBYTE),
        "reduce": (4 << 10, _MEBIBYTE),
        "reduce_scatter": (4 << 10, _SLOT),
        "allgather": (2 << 10, 768 << 10),
        "broadcast": (4 << 10, _SLOT),
        "alltoall": (16 << 10, 192 << 10),
        "gather": (16 << 10, _MEBIBYTE),
        "scatter": (8 << 10, 384 << 10),
    },
}
_STAGED_MPICH: dict[bool, dict[str, Range]] = {
    False: {
        "allreduce": (2 << 10, _MEBIBYTE),
        "reduce": (2 << 10, _SLOT),
        "reduce_scatter": (2 << 10, _SLOT),
        "allgather": (2 << 10, 768 << 10),
        "broadcast": (2 << 10, 768 << 10),
        "alltoall": (2 << 10, 768 << 10),
        "gather": (2 << 10, 768 << 10),
        "scatter": (2 << 10, _MEBIBYTE),
    },
    True: {
        "allreduce": (2 << 10, _SLOT),
        "reduce": (2 << 10, _SLOT),
        "reduce_scatter": (2 << 10, _SLOT),
        "allgather": (2 << 10, _MEBIBYTE),
        "broadcast": (4 << 10, _SLOT),
        "alltoall": (2 << 10, 512 << 10),
        "gather": (2 << 10, _SLOT),
        "scatter": (2 << 10, _SLOT),
    },
}


_SINGLE_COPY: dict[bool, dict[str, Range]] = {
    False: {"allreduce": (4 << 20, _ANY), "reduce_scatter": (_SLOT, _ANY)},
    True: {
        "allreduce": (16 << 20, _ANY),
        "reduce": (16 << 20, _ANY),
        "reduce_scatter": (4 << 20, _ANY),
    },
}
_SINGLE_COPY_MPICH: dict[bool, dict[str, Range]] = {
    False: {
        "allreduce": (2 << 20, _ANY),
        "reduce": (4 << 20, _ANY),
        "reduce_scatter": (_SLOT, _ANY),
    },
    True: {"reduce": (4 << 20, _ANY), "reduce_scatter": (16 << 20, _ANY)},
}
"""Private arrays that the ranks read in each other's memory, where that beat what came before.

Measured as the above, from 2 MB to 64 MB.  Not crowded: allreduce 1.06–1.29 times as fast, reduce
with MPICH 1.1–3.7 (with Open MPI slower), reduce_scatter 1.17–4.3; at 2 MB in place, Open MPI's own
allreduce is faster than this (0.87) and than direct (0.82).  Crowded:
allreduce with MPICH gained nothing, the others 1.04–3.2 from these limits on.
"""


def staged_range(collective: str, library: str, crowded: bool) -> Range:
    """Give the bytes between which private arrays gain by slots of shared memory.

    Parameters
    ----------
    collective : str
        Which.
    library : str
        The MPI library; MPICH's own collectives leave more to be gained than Open MPI's, after
        which all others are judged.
    crowded : bool
        Whether there are more ranks than cores.
    """
    tables = _STAGED_MPICH if library == "MPICH" else _STAGED
    return tables[crowded].get(collective, (0, 0))


def single_copy_range(collective: str, library: str, crowded: bool) -> Range:
    """Give the bytes for which private arrays gain if the ranks read them in each other's memory.

    See :func:`staged_range`.
    """
    tables = _SINGLE_COPY_MPICH if library == "MPICH" else _SINGLE_COPY
    return tables[crowded].get(collective, (0, 0))
