"""Parts of hierarchical algorithms: other algorithms on teams, inside the nodes and between them.

A *team* is some of the ranks.  Two teams of rank 4 in nodes of three, and the leaders::

    node 0:  0  1  2
    node 1:  3 (4) 5      node of rank 4:  3 4 5, its index is 1
    node 2:  6  7  8      lane of rank 4:  1 4 7, its index is 1      leaders:  0 3 6
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, chain
from math import lcm
from operator import index as plain
from typing import Any

from ..schedule.contract import COLLECTIVES
from ..schedule.ranks import ONE, choose, identity, pick, picker, span
from ..schedule.registry import Algorithm, Groups, find
from ..schedule.rounds import Blocks, Copy, Fold, Meet, Parallel, Round, on, steps_of

Share = Callable[[int], Blocks]  # the blocks of one part, by the number of the part
Names = tuple[str, ...]


@dataclass(frozen=True)
class Team:
    """Some of the ranks: ``rank(i)`` is number i of `size`, and `index` is the number of this one.

    For other ranks than this, `index` has no meaning.
    """

    size: int
    index: int
    rank: Callable[[int], int]


@dataclass(frozen=True)
class Nodes:
    """The groups of ranks as flat tuples."""

    flat: tuple[int, ...]  # all ranks, node by node
    starts: tuple[int, ...]  # in `flat`, and the length, of each node
    lengths: tuple[int, ...]
    number: tuple[int, ...]  # of each rank: its node, and its index in the node
    local: tuple[int, ...]
    each: int  # ranks of every node, if those follow each other; else 0

    def at(self, node: int, local: int) -> int:
        """Return the rank of a node with a local index."""
        if self.each:
            return node * self.each + local
        return pick(self.flat, pick(self.starts, node) + local)

    def length(self, node: int) -> int:
        """Return the number of ranks of a node."""
        return self.each or pick(self.lengths, node)

    def place(self, rank: int) -> tuple[int, int]:
        """Return the node of a rank, and its index there."""
        if self.each:
            return rank // self.each, rank % self.each
        return pick(self.number, rank), pick(self.local, rank)


@lru_cache(maxsize=64)
def nodes_of(groups: Groups) -> Nodes:
    """Return the nodes of groups of ranks, of which each rank is in one."""
    flat = tuple(chain.from_iterable(groups))
    lengths = tuple(map(len, groups))
    starts = tuple(accumulate(lengths[:-1], initial=0))
    each = lengths[0] if flat == tuple(range(len(flat))) and len({*lengths}) == 1 else 0
    places = {rank: (k, i) for k, group in enumerate(groups) for i, rank in enumerate(group)}
    number, local = zip(*(places[rank] for rank in range(len(flat))))
    return Nodes(flat, starts, lengths, number, local, each)


def node_of(rank: int, groups: Groups) -> Team:
    """Return all ranks on the node of `rank`, including itself."""
    nodes = nodes_of(groups)
    node, local = nodes.place(rank)
    return Team(plain(nodes.length(node)), local, lambda i: nodes.at(node, i))


def lane_of(rank: int, groups: Groups) -> Team:
    """Return the ranks with the local index of `rank`, one per node, all of which are as large.

    The index in a lane is the number of the node.
    """
    nodes = nodes_of(groups)
    node, local = nodes.place(rank)
    return Team(len(groups), node, lambda k: nodes.at(k, local))


def leaders_of(rank: int, groups: Groups, root: int | None = None) -> Team:
    """Return the leader of each node: the root on its own node, else the first rank.

    The index is the number of the node of `rank`, leader or not.
    """
    nodes = nodes_of(groups)
    home = None if root is None else nodes.place(root)[0]

    def leader(node: int) -> int:
        first = nodes.at(node, 0)
        return first if home is None else choose(node == home, root, first)

    return Team(len(groups), nodes.place(rank)[0], leader)


def play(
    collective: str, name: str, team: Team, share: Share, root: int = 0, later: bool = False
) -> Iterator[Round]:
    """Return this rank's rounds of an algorithm run by a team, on some of the blocks.

    The blocks ``share(i)`` of the enclosing schedule are the part of rank i of the team, and `root`
    is an index too.  For collectives without a part per rank, ``share(0)`` has all blocks.

    The input of one that is `later` is what earlier parts have left in "out", not the caller's.
    The whole team then meets first if it uses slots, in which an earlier part may still be read.
    """
    choice = find(collective, name)
    algorithm = choice.algorithm
    parts = team.size if algorithm.contract.per_rank else 1
    pieces = algorithm.block_count(team.size) // parts

    # Shares (0 1 2 3) and (4 5 6 7), an algorithm of 4 blocks: its block 3 is 6 and 7.
    @cache
    def part_of(owner: int) -> tuple[Callable[[int], int], int]:
        numbers = share(owner)
        if isinstance(numbers, ONE):
            numbers = (numbers,)
        return picker(numbers), len(numbers) // pieces

    def blocks(block: int) -> Blocks:
        if pieces == 1:
            return share(block)
        number, each = part_of(plain(block // pieces))
        first = block % pieces * each
        return tuple([number(first + k) for k in range(each)])

    part = algorithm.schedule(team.index, team.size, root=root, arity=choice.arity or 2)
    rank, places = remembering(team.rank), remembering(blocks)
    if not later or algorithm.memory is None:  # by messages the input is in "out" in any case
        return on(rank, part, places)
    meets = [Meet(tuple(map(rank, range(team.size))))] if algorithm.memory.scratch else []
    return chain(meets, on(rank, part, places, {"in": "out"}))


def remembering(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return a function of a number that remembers what it returned for the same one.

    The steps of a schedule share their peers and blocks.
    """
    known: dict[Hashable, tuple[int, Any]] = {}

    def remembered(index: int) -> Any:
        key = identity(index)
        found = known.get(key)  # kept with the object, so that no other one has its identity
        if found is None:
            found = known[key] = (index, function(index))
        return found[1]

    return remembered


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


def kept(collective: str, local: str, blocks: Sequence[int]) -> Iterator[Round]:
    """Yield a copy of input blocks to "out", if other ranks then read them there, by `local`.

    By messages they get what is in "out" in any case.
    """
    if in_memory(collective, local) and blocks:
        yield Copy(tuple(blocks), tuple(blocks))


def slices(blocks: int, count: int) -> Share:
    """Return the numbers 0 … `blocks` - 1 in `count` consecutive slices of equal length."""
    each = blocks // count
    return lambda i: span(i * each, (i + 1) * each)


def owned(ranks: Iterable[int], blocks: int, size: int) -> tuple[int, ...]:
    """Return the blocks that belong to `ranks`, if `blocks` belong equally to all `size` ranks."""
    each = blocks // size
    if each == 1:
        return tuple(ranks)
    return tuple(block for rank in ranks for block in span(rank * each, (rank + 1) * each))


def owned_by(team: Team, blocks: int, size: int) -> Share:
    """Return the share of each rank of a team: its own blocks."""
    return lambda i: owned((team.rank(i),), blocks, size)


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
