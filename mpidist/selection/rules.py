"""The shipped rules: the executor or algorithm measured to be the fastest, for some calls.

One ordered list for each collective: the first rule that holds for a call, and whose executor or
algorithm can serve it, is taken.  A tuning table's entry is such a list too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .names import IPC, IPC_SLOTS, MPI, NATIVE, NCCL, SINGLE_COPY, STAGED, SYMMETRIC

ANY = math.inf


@dataclass(frozen=True)
class Place:
    """The facts about a communicator, and a call, that rules depend on."""

    size: int  # number of ranks
    nodes: int = 1
    crowded: bool = False  # more ranks than cores; for arrays on a GPU: ranks take turns on one
    native: bool = True  # whether a collective of the MPI library can serve the call


@dataclass(frozen=True)
class Rule:
    """A rule: choose an executor or algorithm for a range of bytes; None: in either case."""

    choose: str  # name of the executor or algorithm
    start: float = 0  # bytes from which the rule holds,
    below: float = ANY  # and below which
    crowded: bool | None = None
    nodes: tuple[float, float] = (1, ANY)  # smallest and largest number of nodes
    ranks: float = ANY  # largest number of ranks
    native: bool | None = None  # whether a collective of the MPI library can serve the call, too
    shared: bool = False  # whether it needs ranks that share a node

    def holds(self, nbytes: float, place: Place) -> bool:
        """Return whether the rule applies to a call of `nbytes`; infinity if the bytes differ."""
        return (
            self.start <= nbytes and (nbytes < self.below or self.below == ANY) and self.at(place)
        )

    def at(self, place: Place) -> bool:
        """Return whether the rule applies to some number of bytes there."""
        return (
            self.crowded in (None, place.crowded)
            and self.nodes[0] <= place.nodes <= self.nodes[1]
            and place.size <= self.ranks
            and self.native in (None, place.native)
            and (not self.shared or place.size > place.nodes)
        )

    @property
    def between_nodes(self) -> bool:
        """Whether the rule chooses a hierarchical algorithm, for ranks on several nodes."""
        return self.nodes[0] > 1

    def __str__(self) -> str:
        """Return the choice and its condition, such as "ring from 32 KiB on"."""
        parts = [f"from {_size(self.start)}"] if self.start else []
        if self.below < ANY:
            last = self.below - 1
            end = f"up to {_size(last)}" if last % 1024 == 0 else f"below {_size(self.below)}"
            parts.append(f"to {end}" if parts and end.startswith("below") else end)
        elif parts:
            parts.append("on")
        crowd = ""
        if self.crowded:
            on_gpu = self.choose in (IPC, IPC_SLOTS)
            crowd = (
                f", {'where ranks take turns on a GPU' if on_gpu else 'with more ranks than cores'}"
            )
        return f"{self.choose} {' '.join(parts) or 'at every size'}{crowd}"


def _size(nbytes: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes:g} B"


# Arrays in symmetric memory.  Measured with Open MPI 5.0.11 and MPICH 5.0.2, on 2 and 4 ranks on 2
# cores, candidates in a random order in every iteration; the bytes hold for both libraries.  To
# keep its deadline, native waits until all ranks have arrived; in symmetric memory the data are
# then one read away, most of all with more ranks than cores.
_SYMMETRIC = (Rule(SYMMETRIC),)

# Private arrays through slots of shared memory: of 10 collectives of 1 to 64 MiB, on 2 ranks and on
# 4 on 2 cores, with the same two libraries, it took 0.1 to 1 of native's time with the first
# reading of the result (alltoall of 2 and 4 MiB on near cores 1.1), and 0.4 to 0.9 of single
# copy's; a scatter with Open MPI 0.7 to 1.3 with more ranks than cores.
_STAGED = (Rule(STAGED),)
# By single copy it took 0.2 to 1 of native's time, where there is no memory for slots.
_SINGLE_COPY = (Rule(SINGLE_COPY, 2 << 20),)


def _symmetric_from(
    start: float, crowded: float, below: float = ANY, ranks: float = ANY
) -> tuple[Rule, ...]:
    return (
        Rule(SYMMETRIC, start, below, crowded=False, ranks=ranks),
        Rule(SYMMETRIC, crowded, below, crowded=True, ranks=ranks),
    )


# A call in symmetric memory meets twice, and one through slots once, with the same bits: up to
# 1 KiB it took 0.92 to 0.97 of the time, at 4 KiB 1; with more ranks than cores, where a meeting
# takes turns on them, 0.7 to 0.9 at 16 KiB (4 and 8 ranks on 2) and 0.7 to 0.94 at 64 KiB, but an
# allreduce 1.25.  In the background there are no slots.
def _in_shared_memory(
    crowded: float = 64 << 10, below: float = ANY, ranks: float = ANY
) -> tuple[Rule, ...]:
    return (
        *_symmetric_from(4 << 10, crowded, below, ranks),
        Rule(STAGED, ranks=ranks),
        Rule(SYMMETRIC, below=below, ranks=ranks),
    )


# Between nodes, see docs/hierarchical.rst: there a native call with a deadline first waits until
# all ranks have arrived, which costs a round trip that our algorithms do not need.
_SEVERAL = (2, ANY)
_SLICES = 16 << 10  # bytes from which a slice per lane is faster, between nodes
_LEADERS = (Rule("hierarchical_leaders", below=_SLICES, nodes=_SEVERAL, native=True),)
_LANES = (
    Rule("hierarchical", _SLICES, nodes=_SEVERAL, native=True),
    Rule("hierarchical_leaders", _SLICES, nodes=_SEVERAL, native=True),
)
_NATIVE = (Rule(NATIVE),)
# For exact sums and fixed trees, which few can serve; never before those above.
_AT_ONCE = (Rule("direct"),)


# Shared memory in the nodes and messages between them, on two nodes of two ranks each on 2 cores.
# Shorter calls wait longer for each other in the nodes than they gain.  Allreduce of symmetric
# arrays took 0.6 of native's time at 256 KiB and 0.4 at 16 MiB on pretended nodes, and 0.7 to 0.8
# of hierarchical/direct over a link without limits, from 1 MiB on; of private ones through slots
# 0.7 to 0.9 and 1.  By single copies it took 0.8 at 16 MiB, and 1.1 over the link.
def _in_nodes(*rules: tuple[str, float, float]) -> tuple[Rule, ...]:
    return tuple(Rule(name, a, b, nodes=_SEVERAL, shared=True) for name, a, b in rules)


def _without_native(*rules: tuple[str, float, float]) -> tuple[Rule, ...]:
    """Return rules without a library's collective (Thakur et al. 2005, figures 5–9)."""
    return tuple(Rule(name, start, below, native=False) for name, start, below in rules)


# The last rank reads the arrays of all others: with many ranks the library's logarithm wins.  On 2
# and 4 ranks a scan took 0.2 to 0.7 of native's time, with MPICH 0.05 to 0.3; an exscan of 8 MiB,
# on 2 ranks one message, three times as long.
_SCANNED = 16
_SCAN_BY_MESSAGES = (
    *_NATIVE,
    *_without_native(("recursive_doubling", 0, 64 << 10), ("chain", 64 << 10, ANY)),
)

RULES: dict[str, tuple[Rule, ...]] = {
    "allreduce": (
        *_in_shared_memory(crowded=32 << 10),
        *_SINGLE_COPY,
        Rule("hierarchical/in_place/recursive_doubling", 64 << 10, nodes=(2, 2), shared=True),
        *_in_nodes(
            ("hierarchical/in_place/recursive_doubling", 64 << 10, 512 << 10),
            ("hierarchical/in_place/ring", 512 << 10, ANY),
            ("hierarchical_leaders/in_place/ring", 64 << 10, ANY),
            ("hierarchical/slots/recursive_doubling", 256 << 10, (2 << 20) + 1),
        ),
        Rule(
            "hierarchical_leaders/binomial/recursive_doubling",
            below=_SLICES,
            nodes=_SEVERAL,
            native=True,
        ),
        Rule("hierarchical/direct/recursive_doubling", _SLICES, nodes=(2, 2), native=True),
        *_LANES,
        # On one node direct took 0.57–0.94 of native's time from 4 MB on (Open MPI 5.0.11 and MPICH
        # 5.0.2, 2 ranks), and from 16 MB on with more ranks than cores (4 on 2; at 4 MB 1.04–1.2
        # with Open MPI).
        Rule("direct", 4 << 20, crowded=False, nodes=(1, 1), ranks=16, native=True),
        Rule("direct", 16 << 20, crowded=True, nodes=(1, 1), ranks=16, native=True),
        # Above 32 MB native maps a full-size temporary in every call, on any nodes.
        Rule(NATIVE, below=32 << 20),
        Rule("ring", 32 << 20, native=True),
        *_without_native(("recursive_doubling", 0, 32 << 10), ("ring", 32 << 10, ANY)),
        *_AT_ONCE,
    ),
    "reduce": (
        *_in_shared_memory(),
        *_SINGLE_COPY,
        *_in_nodes(("hierarchical_leaders/in_place_fetched/binomial", 1 << 20, ANY)),
        *_LEADERS,
        Rule("hierarchical", _SLICES, 256 << 10, nodes=_SEVERAL, native=True),
        *_NATIVE,
        *_without_native(("binomial", 0, 256 << 10), ("reduce_scatter_gather", 256 << 10, ANY)),
        *_AT_ONCE,
    ),
    "broadcast": (
        *_in_shared_memory(),
        *_in_nodes(("hierarchical_leaders/in_place/binomial", 1 << 20, ANY)),
        *_LEADERS,
        *_LANES,
        *_NATIVE,
        *_without_native(("binomial", 0, 512 << 10), ("scatter_allgather", 512 << 10, ANY)),
    ),
    "allgather": (
        *_in_shared_memory(),
        *_in_nodes(("hierarchical_leaders/in_place/ring", 2 << 20, ANY)),
        *_LEADERS,
        *_LANES,
        *_NATIVE,
        *_without_native(("bruck", 0, 64 << 10), ("ring", 64 << 10, ANY)),
    ),
    "reduce_scatter": (
        *_in_shared_memory(),
        *_SINGLE_COPY,
        *_in_nodes(
            ("hierarchical/in_place/ring", 512 << 10, ANY),
            ("hierarchical_leaders/in_place_fetched/ring", 512 << 10, ANY),
            ("hierarchical/slots/ring", 512 << 10, ANY),
        ),
        *_LEADERS,
        *_LANES,
        *_NATIVE,
        *_without_native(("recursive_halving", 0, 64 << 10), ("ring", 64 << 10, ANY)),
        *_AT_ONCE,
    ),
    "gather": (
        *_symmetric_from(32 << 10, crowded=128 << 10),
        *_STAGED,
        *_NATIVE,
        *_without_native(("binomial", 0, ANY)),
    ),
    "scatter": (
        *_symmetric_from(64 << 10, crowded=128 << 10),
        *_STAGED,
        *_NATIVE,
        *_without_native(("binomial", 0, ANY)),
    ),
    "alltoall": (
        *_in_shared_memory(),
        *_NATIVE,
        *_without_native(("bruck", 0, 4 << 10), ("pairwise", 4 << 10, ANY)),
    ),
    "scan": (*_in_shared_memory(ranks=_SCANNED), *_SCAN_BY_MESSAGES),
    "exscan": (*_in_shared_memory(below=4 << 20, ranks=_SCANNED), *_SCAN_BY_MESSAGES),
    "barrier": (*_SYMMETRIC, *_LEADERS, *_NATIVE, *_without_native(("dissemination", 0, ANY))),
}
"""The rules by collective: shared memory first, then several nodes, the MPI library, messages."""

# Arrays on a GPU: in symmetric memory if they are there, else without the host if that is possible.
# The MPI library gets GPU addresses only of calls that move data: Open MPI combines on the host.
# Processes that take turns on a GPU (without MPS) wait 0.15 ms for each turn: a call in the GPUs'
# memory needs several, one through the host few.  An allreduce of 1 MiB on 2 and 4 ranks of an H100
# took 0.54 and 1.23 ms in symmetric memory, 0.77 and 1.69 through slots, 0.31 and 0.46 through the
# host; of 64 MiB 0.9 and 1.8, 1.4 and 3.3, 4.4 and 7.2.
_IPC = (Rule(IPC, crowded=False), Rule(IPC, 4 << 20, crowded=True))
_LONG = Rule(IPC_SLOTS, 16 << 20, crowded=True)
_REDUCTIONS = (Rule(NCCL), Rule(IPC_SLOTS, 512 << 10, crowded=False), _LONG, Rule(STAGED))
_MOVEMENT = (Rule(NCCL), Rule(MPI), Rule(IPC_SLOTS, 64 << 10, crowded=False), _LONG, Rule(STAGED))

ON_DEVICE: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("allreduce", "reduce_scatter"), (*_IPC, *_REDUCTIONS)),
    **dict.fromkeys(("reduce", "scan", "exscan"), _REDUCTIONS),
    **dict.fromkeys(("broadcast", "allgather"), (*_IPC, *_MOVEMENT)),
    **dict.fromkeys(("gather", "scatter", "alltoall"), _MOVEMENT),
    **dict.fromkeys(("send", "recv"), (Rule(MPI), Rule(STAGED))),
}
"""The rules for arrays on a GPU, by collective, and by message."""
