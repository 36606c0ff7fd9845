"""What two-level algorithms are made of: others, played inside a node or between the nodes."""

from collections.abc import Iterator, Sequence
from math import lcm
from typing import Any

from ..schedule.contract import COLLECTIVES
from ..schedule.registry import Algorithm, Groups, find
from ..schedule.rounds import Round, on

Share = Sequence[int]  # blocks that one rank of a part answers for
Names = tuple[str, ...]


def play(
    collective: str,
    name: str,
    ranks: Sequence[int],
    rank: int,
    shares: Sequence[Share],
    root: int = -1,
) -> Iterator[Round]:
    """Play an algorithm on some of the ranks and of the blocks.

    Parameters
    ----------
    collective, name : str
        Which algorithm.
    ranks : sequence of int
        Who plays it; ``ranks[i]`` is its rank `i`.
    rank : int
        This rank, one of them.
    shares : sequence of sequence of int
        The blocks that stand for each rank's part in the algorithm; a single share for collectives
        that do not deal in a part per rank.
    root : int
        One of `ranks`, where the collective has a root.
    """
    choice, size = find(collective, name), len(ranks)
    algorithm = choice.algorithm
    pieces = algorithm.block_count(size) // len(shares)

    def blocks(block: int) -> Any:
        share = shares[block // pieces]
        each = len(share) // pieces
        first = block % pieces * each
        return share[first : first + each]

    at = ranks.index(root) if root in ranks else 0
    part = algorithm.schedule(ranks.index(rank), size, root=at, arity=choice.arity or 2)
    return on(ranks, part, blocks)


def node_of(rank: int, groups: Groups) -> tuple[int, ...]:
    """Give the ranks on the node of a rank."""
    return next(group for group in groups if rank in group)


def lane_of(rank: int, groups: Groups) -> tuple[int, ...]:
    """Give the ranks that have the same place on their nodes as this one; nodes are equal."""
    index = node_of(rank, groups).index(rank)
    return tuple(group[index] for group in groups)


def member(lane: Sequence[int], node: Sequence[int]) -> int:
    """Give the rank that a lane has on a node."""
    return next(rank for rank in lane if rank in node)


def leaders_of(groups: Groups, root: int = -1) -> tuple[int, ...]:
    """Give the rank of each node that speaks for it: the root on its own node, else the first."""
    return tuple(root if root in group else group[0] for group in groups)


def slices(blocks: int, ranks: Sequence[int]) -> list[Share]:
    """Cut all blocks evenly among `ranks`."""
    each = blocks // len(ranks)
    return [range(i * each, (i + 1) * each) for i in range(len(ranks))]


def owned(ranks: Sequence[int], blocks: int, size: int) -> tuple[int, ...]:
    """Give the blocks of `ranks` where the data are cut into as many for each rank."""
    each = blocks // size
    return tuple(block for rank in ranks for block in range(rank * each, (rank + 1) * each))


def lanes(collective: str, inside: Names, between: Names) -> dict[str, Any]:
    """Declare an all-lanes algorithm: it needs equal nodes, and blocks that its parts can cut.

    Parameters
    ----------
    collective : str
        What it serves.
    inside, between : tuple of str
        The collectives that are played inside the nodes, and along the lanes between them.
    """
    made = leading(collective, inside, between)
    dealt = {name: COLLECTIVES[name].per_rank for name in (collective, *inside)}
    # Sliced where the node's part deals one to each lane; a barrier has nothing to deal.
    sliced = any(dealt.values()) and not dealt[collective]

    def requires(size: int, *, groups: Groups, local: str, across: str) -> str | None:
        lengths = sorted({len(group) for group in groups})
        if len(lengths) > 1:
            many = " and ".join(map(str, lengths))
            return f"its lanes need as many ranks on every node, there are {many}"
        return made["requires"](size, groups=groups, local=local, across=across)

    def blocks(size: int, *, groups: Groups, local: str, across: str) -> int:
        lanes = len(groups[0]) if sliced else 1
        return lanes * made["blocks"](size, groups=groups, local=local, across=across)

    return {"requires": requires, "blocks": blocks}


def leading(collective: str, inside: Names, between: Names) -> dict[str, Any]:
    """Declare a leaders-only algorithm; see :func:`lanes`."""
    per_rank = COLLECTIVES[collective].per_rank

    def parts(groups: Groups, local: str, across: str) -> Iterator[tuple[Algorithm, int]]:
        for part in inside:
            for length in sorted({len(group) for group in groups}):
                yield find(part, local).algorithm, length
        for part in between:
            yield find(part, across).algorithm, len(groups)

    def requires(size: int, *, groups: Groups, local: str, across: str) -> str | None:
        for part, ranks in parts(groups, local, across):
            reason = part.unsupported(ranks)
            if reason is not None:
                return f"{part.label} on {ranks} ranks: {reason}"
        return None

    def blocks(size: int, *, groups: Groups, local: str, across: str) -> int:
        pieces = 1  # so many of each share, that every part can cut it
        for part, ranks in parts(groups, local, across):
            shares = ranks if part.contract.per_rank else 1
            pieces = lcm(pieces, part.block_count(ranks) // shares)
        return pieces * size if per_rank else pieces

    return {"requires": requires, "blocks": blocks}
