"""Hierarchical algorithms composed of other algorithms, inside the nodes and between them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import lcm
from typing import Any

from ..schedule.contract import COLLECTIVES
from ..schedule.registry import Algorithm, Groups, find
from ..schedule.rounds import Copy, Fold, Meet, Parallel, Round, on, steps_of

Share = Sequence[int]  # the blocks of one rank's part
Names = tuple[str, ...]


def play(
    collective: str,
    name: str,
    ranks: Sequence[int],
    rank: int,
    shares: Sequence[Share],
    root: int = -1,
    later: bool = False,
) -> Iterator[Round]:
    """Return the rounds of an algorithm run on a subset of the ranks and of the blocks.

    ``ranks[i]``, of which `rank` and the `root` are two, is the algorithm's rank i, and the blocks
    ``shares[i]`` of the enclosing schedule are its part.  For collectives without a part per rank,
    the only share has all blocks to work on.

    The input of one that is `later` is what earlier parts have left in "out", not the caller's.
    All `ranks` then meet first if it uses slots, in which an earlier part may still be read.
    """
    choice, size = find(collective, name), len(ranks)
    algorithm = choice.algorithm
    pieces = algorithm.block_count(size) // len(shares)

    # Shares (0 1 2 3) and (4 5 6 7), an algorithm of 4 blocks: its block 3 is 6 and 7.
    def blocks(block: int) -> Any:
        share = shares[block // pieces]
        each = len(share) // pieces
        first = block % pieces * each
        return share[first : first + each]

    at = ranks.index(root) if root in ranks else 0
    part = algorithm.schedule(ranks.index(rank), size, root=at, arity=choice.arity or 2)
    if not later or algorithm.memory is None:  # by messages the input is in "out" in any case
        return on(ranks, part, blocks)
    first = [Meet(tuple(ranks))] if algorithm.memory.scratch else []
    return chain(first, on(ranks, part, blocks, {"in": "out"}))


def in_memory(collective: str, name: str) -> bool:
    """Return whether an algorithm reaches the memory of other ranks."""
    return find(collective, name).algorithm.memory is not None


def behind_fold(schedule: Iterable[Round], between: Iterable[Round]) -> Iterator[Round]:
    """Yield a schedule of a node, and once it has combined a block that of the other nodes.

    No meeting is needed in between: of the slices only this rank's own is touched::

        rank 2 of 3   meet  fold slice 2   lane of slice 2   put slice 2  meet
    """
    for item in schedule:
        yield item
        if not isinstance(item, Parallel) and any(isinstance(s, Fold) for s in steps_of(item)):
            yield from between


def kept(collective: str, local: str, blocks: Share) -> Iterator[Round]:
    """Yield a copy of input blocks to "out", if other ranks then read them there, by `local`.

    By messages they get what is in "out" in any case.
    """
    if in_memory(collective, local) and blocks:
        yield Copy(tuple(blocks), tuple(blocks))


def node_of(rank: int, groups: Groups) -> tuple[int, ...]:
    """Return all ranks on the node of `rank`, including itself."""
    return next(group for group in groups if rank in group)


def lane_of(rank: int, groups: Groups) -> tuple[int, ...]:
    """Return the ranks with the local rank of `rank`, one per node; nodes must be of one size."""
    index = node_of(rank, groups).index(rank)
    return tuple(group[index] for group in groups)


def member(lane: Sequence[int], node: Sequence[int]) -> int:
    """Return the one rank that is both in a lane and on a node."""
    return next(rank for rank in lane if rank in node)


def leaders_of(groups: Groups, root: int = -1) -> tuple[int, ...]:
    """Return the leader of each node: the root on its own node, else the first rank."""
    return tuple(root if root in group else group[0] for group in groups)


def slices(blocks: int, ranks: Sequence[int]) -> list[Share]:
    """Return the numbers 0 … `blocks` - 1 in consecutive slices of equal length, one per rank."""
    each = blocks // len(ranks)
    return [range(i * each, (i + 1) * each) for i in range(len(ranks))]


def owned(ranks: Sequence[int], blocks: int, size: int) -> tuple[int, ...]:
    """Return the blocks that belong to `ranks`, if `blocks` belong equally to all `size` ranks."""
    each = blocks // size
    return tuple(block for rank in ranks for block in range(rank * each, (rank + 1) * each))


def lanes(collective: str, inside: Names, between: Names) -> dict[str, Any]:
    """Return the arguments `requires`, `blocks` and `tree` of ``@algorithm`` for one on all lanes.

    `inside` are the collectives used inside the nodes, and `between` those along the lanes.
    """
    made = leading(collective, inside, between)
    per_rank = {name: COLLECTIVES[name].per_rank for name in (collective, *inside)}
    # One slice per lane if the collectives inside the node have a part per rank (not a barrier).
    sliced = any(per_rank.values()) and not per_rank[collective]

    def requires(size: int, *, groups: Groups, local: str, across: str) -> str | None:
        lengths = sorted({len(group) for group in groups})
        if len(lengths) > 1:
            many = " and ".join(map(str, lengths))
            return f"nodes of {many} ranks: expected equally many ranks on every node"
        return made["requires"](size, groups=groups, local=local, across=across)

    def blocks(size: int, *, groups: Groups, local: str, across: str) -> int:
        lanes = len(groups[0]) if sliced else 1
        return lanes * made["blocks"](size, groups=groups, local=local, across=across)

    return made | {"requires": requires, "blocks": blocks}


def leading(collective: str, inside: Names, between: Names) -> dict[str, Any]:
    """Return what :func:`lanes` does, with the nodes' leaders in place of the lanes."""
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
        for name in between:
            if in_memory(name, across):
                return f"{across} between nodes: expected an algorithm of messages"
        return None

    def blocks(size: int, *, groups: Groups, local: str, across: str) -> int:
        pieces = 1  # of each share, a multiple of the blocks of every part
        for part, ranks in parts(groups, local, across):
            shares = ranks if part.contract.per_rank else 1
            pieces = lcm(pieces, part.block_count(ranks) // shares)
        return pieces * size if per_rank else pieces

    def tree(size: int, *, groups: Groups, local: str, across: str) -> bool:
        # Nodes of a power of two of ranks, which follow each other, are subtrees.
        each = len(groups[0])
        subtrees = len(groups) == 1 or (
            not each & (each - 1)
            and [*chain(*groups)] == [*range(size)]
            and {len(group) for group in groups[:-1]} == {each} >= {max(each, len(groups[-1]))}
        )
        combining = [(a, n) for a, n in parts(groups, local, across) if a.contract.reduces]
        return subtrees and all(a.combines_as_tree(n) for a, n in combining)

    return {"requires": requires, "blocks": blocks, "tree": tree}
