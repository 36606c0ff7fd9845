"""Hierarchical algorithms by leaders, one rank of each node; p ranks, n bytes, nodes of any sizes.

``hierarchical_leaders/LOCAL/ACROSS`` names the algorithms inside the nodes and among the leaders,
the arguments `local` and `across`; `groups` are the ranks of each node, and `blocks` is the number
of blocks that the data are cut into.
"""

from collections.abc import Iterator

from ..schedule.ranks import choose
from ..schedule.registry import Groups, algorithm
from ..schedule.rounds import Round
from .levels import Share, kept, leaders_of, leading, node_of, nodes_of, owned, owned_by, play


def _by_node(groups: Groups, blocks: int, size: int) -> Share:
    """Return the share of each node: the blocks that belong to its ranks."""
    nodes = nodes_of(groups)

    def share(node: int) -> tuple[int, ...]:
        ranks = range(nodes.length(node))
        return owned((nodes.at(node, i) for i in ranks), blocks, size)

    return share


@algorithm(
    "allreduce",
    "hierarchical_leaders",
    **leading("allreduce", ("reduce", "broadcast"), ("allreduce",)),
)
def allreduce_hierarchical_leaders(
    rank: int,
    size: int,
    *,
    groups: Groups,
    blocks: int,
    local: str = "binomial",
    across: str = "ring",
) -> Iterator[Round]:
    """Reduce to the first rank of each node, allreduce among these ranks, broadcast in each node.

    Rounds: 2 ceil(lg g) + 2(m-1) on m nodes of at most g ranks.  Bytes per rank: 2(m-1)/m n
    between nodes for a leader.
    Source: Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
    collective operation performance", IPDPS 2000.

    5 ranks on nodes of 3 and 2::

        1, 2 --> 0 <-> 3 <-- 4    then    0 --> 1, 2    3 --> 4
    """
    node, leaders = node_of(rank, groups), leaders_of(rank, groups)
    yield from play("reduce", local, node, lambda _: range(blocks))
    if node.index == 0:
        yield from play("allreduce", across, leaders, lambda _: range(blocks))
    yield from play("broadcast", local, node, lambda _: range(blocks), later=True)


@algorithm("reduce", "hierarchical_leaders", **leading("reduce", ("reduce",), ("reduce",)))
def reduce_hierarchical_leaders(
    rank: int,
    size: int,
    *,
    root: int,
    groups: Groups,
    blocks: int,
    local: str = "binomial",
    across: str = "binomial",
) -> Iterator[Round]:
    """Reduce to the leader of each node, then among the leaders; the root is its node's leader.

    Rounds: ceil(lg g) + ceil(lg m) on m nodes of at most g ranks.  Bytes per rank: n.
    Source: Karonis et al., IPDPS 2000.

    5 ranks on nodes of 3 and 2, root 1::

        0, 2 --> 1    4 --> 3    then    3 --> 1
    """
    node, leaders = node_of(rank, groups), leaders_of(rank, groups, root)
    home, at = leaders_of(root, groups).index, node_of(root, groups).index
    top = choose(leaders.index == home, at, 0)  # of the leader in its node
    yield from play("reduce", local, node, lambda _: range(blocks), top)
    if node.index == top:
        yield from play("reduce", across, leaders, lambda _: range(blocks), home)


@algorithm(
    "broadcast", "hierarchical_leaders", **leading("broadcast", ("broadcast",), ("broadcast",))
)
def broadcast_hierarchical_leaders(
    rank: int,
    size: int,
    *,
    root: int,
    groups: Groups,
    blocks: int,
    local: str = "binomial",
    across: str = "binomial",
) -> Iterator[Round]:
    """Broadcast among the nodes' leaders, then in each node; the root is its node's leader.

    Rounds: ceil(lg m) + ceil(lg g) on m nodes of at most g ranks.  Bytes per rank: at most n lg p.
    Source: Karonis et al., IPDPS 2000.

    5 ranks on nodes of 3 and 2, root 1::

        1 --> 3    then    1 --> 0, 2    3 --> 4
    """
    node, leaders = node_of(rank, groups), leaders_of(rank, groups, root)
    home, at = leaders_of(root, groups).index, node_of(root, groups).index
    top = choose(leaders.index == home, at, 0)  # of the leader in its node
    if rank == root:
        yield from kept("broadcast", local, range(blocks))
    if node.index == top:
        yield from play("broadcast", across, leaders, lambda _: range(blocks), home)
    yield from play("broadcast", local, node, lambda _: range(blocks), top, later=True)


@algorithm(
    "allgather", "hierarchical_leaders", **leading("allgather", ("broadcast",), ("allgather",))
)
def allgather_hierarchical_leaders(
    rank: int,
    size: int,
    *,
    groups: Groups,
    blocks: int,
    local: str = "binomial",
    across: str = "ring",
) -> Iterator[Round]:
    """Gather on the first rank of each node, allgather among these ranks, broadcast in each node.

    Rounds: 1 + m-1 + ceil(lg g) on m nodes of at most g ranks.  Bytes per rank: at least n/p
    for the others, and for a leader (m-1)/m n between nodes, and n lg g inside.
    Source: Karonis et al., IPDPS 2000.

    5 ranks on nodes of 3 and 2, with the blocks that move::

        1, 2 --> 0 <-[0,1,2],[3,4]-> 3 <-- 4    then    0 -all-> 1, 2    3 -all-> 4
    """
    node, leaders = node_of(rank, groups), leaders_of(rank, groups)
    if node.index == 0:
        yield from kept("broadcast", local, owned((rank,), blocks, size))
    yield from play("gather", "linear", node, owned_by(node, blocks, size))
    if node.index == 0:
        yield from play("allgather", across, leaders, _by_node(groups, blocks, size))
    yield from play("broadcast", local, node, lambda _: range(blocks), later=True)


@algorithm(
    "reduce_scatter",
    "hierarchical_leaders",
    **leading("reduce_scatter", ("reduce",), ("reduce_scatter",)),
)
def reduce_scatter_hierarchical_leaders(
    rank: int,
    size: int,
    *,
    groups: Groups,
    blocks: int,
    local: str = "binomial",
    across: str = "ring",
) -> Iterator[Round]:
    """Reduce to the first rank of each node, reduce-scatter among these, scatter in each node.

    Rounds: ceil(lg g) + m-1 + 1 on m nodes of at most g ranks.  Bytes per rank: n for the others,
    and for a leader (m-1)/m n between nodes, and less than n/m inside.
    Source: Karonis et al., IPDPS 2000.

    5 ranks on nodes of 3 and 2, with the blocks that move::

        1, 2 -all-> 0 <-[3,4],[0,1,2]-> 3 <-all- 4    then    0 --> 1, 2    3 --> 4
    """
    node, leaders = node_of(rank, groups), leaders_of(rank, groups)
    yield from play("reduce", local, node, lambda _: range(blocks))
    if node.index == 0:
        yield from play("reduce_scatter", across, leaders, _by_node(groups, blocks, size))
    yield from play("scatter", "linear", node, owned_by(node, blocks, size))


@algorithm(
    "barrier", "hierarchical_leaders", **leading("barrier", ("reduce", "broadcast"), ("barrier",))
)
def barrier_hierarchical_leaders(
    rank: int,
    size: int,
    *,
    groups: Groups,
    blocks: int,
    local: str = "binomial",
    across: str = "dissemination",
) -> Iterator[Round]:
    """Each node's first rank waits for its node, then for the other nodes, and notifies its node.

    Rounds: 2 ceil(lg g) + ceil(lg m) on m nodes of at most g ranks.  Bytes per rank: empty
    messages, ceil(lg m) between nodes for a leader.
    Source: Karonis et al., IPDPS 2000.

    5 ranks on nodes of 3 and 2::

        1, 2 --> 0 <-> 3 <-- 4    then    0 --> 1, 2    3 --> 4
    """
    node, leaders = node_of(rank, groups), leaders_of(rank, groups)
    yield from play("reduce", local, node, lambda _: range(blocks))
    if node.index == 0:
        yield from play("barrier", across, leaders, lambda _: range(blocks))
    yield from play("broadcast", local, node, lambda _: range(blocks), later=True)
