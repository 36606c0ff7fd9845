"""Hierarchical allreduce: first the fast links in the nodes, then the slow ones between."""

from collections.abc import Iterator

from ..schedule.registry import Groups, algorithm
from ..schedule.rounds import Round, on
from .binomial import broadcast_binomial, reduce_binomial
from .direct import allgather_direct, reduce_scatter_direct
from .ring import allreduce_ring


def _equal(size: int, groups: Groups) -> str | None:
    lengths = sorted({len(group) for group in groups})
    if len(lengths) == 1:
        return None
    return (
        f"its lanes need as many ranks on every node, there are {' and '.join(map(str, lengths))}"
    )


def _place(rank: int, groups: Groups) -> tuple[int, int]:
    """Give the node of a rank and its position there."""
    node = next(i for i, group in enumerate(groups) if rank in group)
    return node, groups[node].index(rank)


@algorithm("allreduce", "hierarchical", blocks=lambda size, groups: size, requires=_equal)
def allreduce_hierarchical(rank: int, size: int, *, groups: Groups) -> Iterator[Round]:
    """Reduce-scatter in the node, allreduce each slice across the nodes, allgather in the node.

    Every rank is busy between the nodes: these are the "lanes".

    Rounds: 2 + 2(m-1) on m nodes.  Bytes per rank: 2(g-1)/g n inside a node of g ranks, and
    2(m-1)/m n/g between nodes.
    Source: Träff and Hunold, "Decomposing MPI collectives for exploiting multi-lane communication",
    CLUSTER 2020.

    2 nodes of 2 (it needs equal nodes; 5 ranks go by leaders), the slices that move::

        (0 <-> 1) (2 <-> 3)    0 <-a-> 2  1 <-b-> 3    (0 <-> 1) (2 <-> 3)
    """
    node, index = _place(rank, groups)
    here, nodes = groups[node], len(groups)

    def slice_of(local: int) -> range:
        return range(local * nodes, (local + 1) * nodes)

    lane = [group[index] for group in groups]
    yield from on(here, reduce_scatter_direct(index, len(here)), slice_of)
    yield from on(lane, allreduce_ring(node, nodes), slice_of(index).__getitem__)
    yield from on(here, allgather_direct(index, len(here)), slice_of)


@algorithm("allreduce", "hierarchical_leaders", blocks=lambda size, groups: len(groups))
def allreduce_hierarchical_leaders(rank: int, size: int, *, groups: Groups) -> Iterator[Round]:
    """Reduce to the first rank of each node, allreduce among these, broadcast inside the node.

    Rounds: 2 ceil(lg g) + 2(m-1) on m nodes of at most g ranks.  Bytes per rank: 2(m-1)/m n
    between nodes for a leader.
    Source: Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
    collective operation performance", IPDPS 2000.

    5 ranks on nodes of 3 and 2::

        1, 2 --> 0 <-> 3 <-- 4    then    0 --> 1, 2    3 --> 4
    """
    node, index = _place(rank, groups)
    here, everything = groups[node], range(len(groups))
    yield from on(here, reduce_binomial(index, len(here), root=0), lambda block: everything)
    if index == 0:
        leaders = [group[0] for group in groups]
        yield from on(leaders, allreduce_ring(node, len(groups)))
    yield from on(here, broadcast_binomial(index, len(here), root=0), lambda block: everything)
