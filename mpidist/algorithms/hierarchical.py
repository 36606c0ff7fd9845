"""Hierarchical algorithms on lanes (all ranks of one local rank), with a slice of n bytes each.

A *lane* is the ranks with the same local rank, one per node.  ``hierarchical/LOCAL/ACROSS`` names
the algorithms inside the nodes and along the lanes, the arguments `local` and `across`; `groups`
are the ranks of each node, and `blocks` is the number of blocks that the data are cut into.
"""

from collections.abc import Iterator

from ..schedule.registry import Groups, algorithm
from ..schedule.rounds import Round
from .levels import (
    Share,
    behind_fold,
    in_memory,
    kept,
    lane_of,
    lanes,
    node_of,
    nodes_of,
    owned,
    owned_by,
    play,
    slices,
)
from .relabel import sparing


def _by_lane(groups: Groups, blocks: int, size: int) -> Share:
    """Return the share of each local index: the blocks that belong to the ranks of its lane."""
    nodes = nodes_of(groups)
    return lambda i: owned((nodes.at(k, i) for k in range(len(groups))), blocks, size)


@algorithm(
    "allreduce",
    "hierarchical",
    **lanes("allreduce", ("reduce_scatter", "allgather"), ("allreduce",)),
)
def allreduce_hierarchical(
    rank: int,
    size: int,
    *,
    groups: Groups,
    blocks: int,
    local: str = "direct",
    across: str = "ring",
) -> Iterator[Round]:
    """Reduce-scatter in the node, allreduce each slice along its lane, allgather in the node.

    Rounds: 2 + 2(m-1) on m nodes.  Bytes per rank: 2(g-1)/g n inside a node of g ranks, and
    2(m-1)/m n/g between nodes.  In shared memory the two parts in the node are those of its
    allreduce, and the lanes take each slice on once it is combined.
    Source: Träff and Hunold, "Decomposing MPI collectives for exploiting multi-lane communication",
    CLUSTER 2020.

    2 nodes of 2 (nodes must be equal; for 5 ranks see the leaders), the slices that move::

        (0 <-> 1) (2 <-> 3)    0 <-a-> 2  1 <-b-> 3    (0 <-> 1) (2 <-> 3)
    """
    node, lane = node_of(rank, groups), lane_of(rank, groups)
    share = slices(blocks, node.size)
    between = play("allreduce", across, lane, lambda _: share(node.index))
    if in_memory("allreduce", local):
        yield from behind_fold(play("allreduce", local, node, lambda _: range(blocks)), between)
        return
    yield from play("reduce_scatter", local, node, share)
    yield from between
    yield from play("allgather", local, node, share, later=True)


@algorithm("reduce", "hierarchical", **lanes("reduce", ("reduce_scatter",), ("reduce",)))
def reduce_hierarchical(
    rank: int,
    size: int,
    *,
    root: int,
    groups: Groups,
    blocks: int,
    local: str = "direct",
    across: str = "binomial",
) -> Iterator[Round]:
    """Reduce-scatter in every node, reduce each slice along its lane, gather on the root's node.

    Rounds: 2 + ceil(lg m) on m nodes.  Bytes per rank: (g-1)/g n inside a node of g ranks, n/g
    between nodes, and n/g to the root.
    Source: Träff and Hunold, CLUSTER 2020.

    2 nodes of 2, root 0, the slices that move::

        (0 <-> 1) (2 <-> 3)    2 -a-> 0  3 -b-> 1    1 -b-> 0
    """
    node, lane = node_of(rank, groups), lane_of(rank, groups)
    home, at = lane_of(root, groups).index, node_of(root, groups).index
    share = slices(blocks, node.size)
    yield from play("reduce_scatter", local, node, share)
    yield from play("reduce", across, lane, lambda _: share(node.index), home)
    if lane.index == home:
        yield from play("gather", "linear", node, share, at)


@algorithm("broadcast", "hierarchical", **lanes("broadcast", ("allgather",), ("broadcast",)))
def broadcast_hierarchical(
    rank: int,
    size: int,
    *,
    root: int,
    groups: Groups,
    blocks: int,
    local: str = "direct",
    across: str = "binomial",
) -> Iterator[Round]:
    """Scatter on the root's node, broadcast each slice along its lane, allgather in every node.

    Rounds: 2 + ceil(lg m) on m nodes.  Bytes per rank: (g-1)/g n inside a node of g ranks (on the
    root twice that), and at most n/g lg m between nodes.
    Source: Träff and Hunold, CLUSTER 2020.

    2 nodes of 2, root 0, the slices that move::

        0 -b-> 1    0 -a-> 2  1 -b-> 3    0 -a-> 1  (2 <-> 3)
    """
    node, lane = node_of(rank, groups), lane_of(rank, groups)
    home, at = lane_of(root, groups).index, node_of(root, groups).index
    share = slices(blocks, node.size)
    if rank == root:
        yield from kept("allgather", local, range(blocks))
    if lane.index == home:
        yield from play("scatter", "linear", node, share, at)
    yield from play("broadcast", across, lane, lambda _: share(node.index), home)
    yield from sparing(root, rank, play("allgather", local, node, share, later=True))


@algorithm("allgather", "hierarchical", **lanes("allgather", ("allgather",), ("allgather",)))
def allgather_hierarchical(
    rank: int,
    size: int,
    *,
    groups: Groups,
    blocks: int,
    local: str = "direct",
    across: str = "ring",
) -> Iterator[Round]:
    """Allgather along every lane, then allgather the lanes' blocks in every node.

    Rounds: m on m nodes.  Bytes per rank: (g-1)/g n inside a node of g ranks, (m-1)/m n/g between
    nodes.
    Source: Träff and Hunold, CLUSTER 2020.

    2 nodes of 2, with the blocks that move::

        0 <-[0],[2]-> 2  1 <-[1],[3]-> 3    0 <-[0,2],[1,3]-> 1  2 <-[0,2],[1,3]-> 3
    """
    node, lane = node_of(rank, groups), lane_of(rank, groups)
    yield from kept("allgather", local, owned((rank,), blocks, size))
    yield from play("allgather", across, lane, owned_by(lane, blocks, size))
    yield from play("allgather", local, node, _by_lane(groups, blocks, size), later=True)


@algorithm(
    "reduce_scatter",
    "hierarchical",
    **lanes("reduce_scatter", ("reduce_scatter",), ("reduce_scatter",)),
)
def reduce_scatter_hierarchical(
    rank: int,
    size: int,
    *,
    groups: Groups,
    blocks: int,
    local: str = "direct",
    across: str = "ring",
) -> Iterator[Round]:
    """Reduce-scatter the lanes' blocks in every node, then reduce-scatter along every lane.

    Rounds: m on m nodes.  Bytes per rank: (g-1)/g n inside a node of g ranks, (m-1)/m n/g between
    nodes.
    Source: Träff and Hunold, CLUSTER 2020.

    2 nodes of 2, with the blocks that move::

        0 <-[0,2],[1,3]-> 1  2 <-[0,2],[1,3]-> 3    0 <-[0],[2]-> 2  1 <-[1],[3]-> 3
    """
    node, lane = node_of(rank, groups), lane_of(rank, groups)
    yield from play("reduce_scatter", local, node, _by_lane(groups, blocks, size))
    yield from play("reduce_scatter", across, lane, owned_by(lane, blocks, size))


@algorithm("barrier", "hierarchical", **lanes("barrier", ("barrier",), ("barrier",)))
def barrier_hierarchical(
    rank: int,
    size: int,
    *,
    groups: Groups,
    blocks: int,
    local: str = "dissemination",
    across: str = "dissemination",
) -> Iterator[Round]:
    """A barrier in every node, then one along every lane.

    Rounds: ceil(lg g) + ceil(lg m) on m nodes of g ranks.  Bytes per rank: an empty message each.
    Source: Hensgen, Finkel and Manber, IJPP 17 (1988), in each; Träff and Hunold, CLUSTER 2020.

    2 nodes of 2::

        (0 <-> 1) (2 <-> 3)    0 <-> 2  1 <-> 3
    """
    yield from play("barrier", local, node_of(rank, groups), lambda _: range(blocks))
    yield from play("barrier", across, lane_of(rank, groups), lambda _: range(blocks))
