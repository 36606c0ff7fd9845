"""Schedules in shared memory as phases: what a rank stores where, between the meetings of all.

The meetings of all ranks are put into one order, and a rank's rounds into the phase behind its last
meeting.  A rank that is not in a group passes the group's meetings without waiting, so every rank
counts the same meetings.  Each step becomes rows, one for each block; a round with messages stays
as it is::

    rank 2 of 3, block 2: (rank, buffer, block)
    Fold((2, 1, 0), blocks=2)     (2 in 2), (1 in 2), (0 in 2)  -->  (2 out 2)
    Put(0, 2), Put(1, 2)          (2 out 2)                     -->  (0 out 2), (1 out 2)
    both in one row               (2 in 2), (1 in 2), (0 in 2)  -->  (2 out 2), (0 out 2), (1 out 2)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from ..errors import ScheduleError
from .memories import Memory
from .rounds import (
    BUFFERS,
    ONE_SIDED,
    Copy,
    Fold,
    Get,
    Meet,
    Parallel,
    Put,
    Recv,
    Reduce,
    Schedule,
    Send,
    Step,
    block_tuple,
    steps_of,
)

Cell = tuple[int, str, int]  # rank, buffer and block
REST = "rest"
"""The blocks of "out" that are not in a rank's result, as a buffer of their own."""
_ASIDE = "aside"  # scratch memory for copies between blocks that overlap


@dataclass(slots=True)
class Row:
    """One block, copied or combined, and stored in one place or several."""

    sources: tuple[Cell, ...]  # the block to copy, or the blocks to combine, in this order
    targets: list[Cell]
    ranks: tuple[int, ...] = ()  # of a Fold's operands; empty for a copy


Messages = tuple[Step, ...]
"""A round that sends or receives messages, with its copies."""
_MESSAGES = (Send, Recv, Reduce)


@dataclass(slots=True)
class Phases:
    """The schedule of one rank in shared memory, and what the others of its node do to its buffers.

    The first phase is before the first meeting.
    """

    count: int  # of the blocks that the data are cut into
    ranks: tuple[int, ...]  # of the node
    # The rows and the rounds of messages of each phase, in order.
    rows: list[list[Row | Messages]] = field(default_factory=list)
    # The other ranks that this rank awaits in each meeting.
    awaits: list[tuple[int, ...]] = field(default_factory=list)
    # For each phase, the (buffer, block) of this rank in which another rank stores, and which.
    stored: list[dict[tuple[str, int], int]] = field(default_factory=list)
    # The ranks, of all nodes, and their buffers that others read or write; see also REST.
    reached: set[tuple[int, str]] = field(default_factory=set)
    # For each block of a slot, the blocks of any rank that it holds in turn, and so must be long
    # enough for; and for each of the scratch memory of copies that overlap.
    held: dict[Cell, set[Cell]] = field(default_factory=dict)
    complete: bool = True  # whether every Fold has the operands of all ranks
    meets_all: bool = True  # whether there is a meeting in which all ranks of a node await all
    meetings: int = 0  # the most on any node
    has_messages: bool = False  # on any rank
    messages_first: bool = False  # on this node, before the first meeting of a rank


def phases_of(
    schedule: Callable[[int], Schedule],
    rank: int,
    groups: Sequence[Sequence[int]],
    count: int,
    results: Callable[[int], range],
    memory: Memory | None = None,
) -> Phases:
    """Return the phases of one rank, whose data are cut into `count` blocks.

    ``schedule(rank)`` returns the rounds of any rank: where one stores, another one reads.
    ``results(rank)`` are the blocks of "out" in its result.

    Raises ScheduleError if the ranks' meetings cannot all take place, or a step reaches the memory
    of another node, or a buffer that `memory` (by default everything) does not let it reach.
    """
    made = Phases(count, next(tuple(group) for group in groups if rank in group))
    mine: list[list[list[Row] | Messages]] = []
    # The other nodes, too: what a call needs must be known alike on all ranks.
    for group in groups:
        rounds = {peer: list(_flat(schedule(peer))) for peer in group}
        for peer, theirs in rounds.items():
            for step in chain.from_iterable(theirs):
                if isinstance(step, _MESSAGES):
                    _check_peer(peer, groups, step)
                elif isinstance(step, ONE_SIDED):
                    _check(peer, group, step)
                    if memory is not None:
                        _check_reach(peer, step, memory)
        order = _meetings(rounds)
        if rank in group:
            made.stored = [{} for _ in range(len(order) + 1)]
        made.meetings = max(made.meetings, len(order))
        of_all = set(range(len(order)))
        for peer, theirs in rounds.items():
            phases, awaits = _in_phases(peer, theirs, order)
            of_all &= {n for n, found in enumerate(awaits) if len(found) == len(group) - 1}
            if peer == rank:
                mine, made.awaits = phases, awaits
            for number, phase in enumerate(phases):
                for part in phase:
                    if isinstance(part, tuple):
                        made.complete &= not any(isinstance(step, Reduce) for step in part)
                        made.has_messages = True
                        made.messages_first |= number == 0 and rank in group
                        continue
                    for row in part:
                        made.complete &= len(row.ranks) in (0, sum(map(len, groups)))
                        _note(made, number, row, rank, peer, results)
        made.meets_all &= bool(of_all)
    uses = Counter(chain.from_iterable(map(partial(_read, rank), chain.from_iterable(mine))))
    private = "" if (rank, "tmp") in made.reached else "tmp"
    made.rows = [_joined(phase, uses, private) for phase in mine]
    return made


def _note(
    made: Phases, phase: int, row: Row, rank: int, peer: int, results: Callable[[int], range]
) -> None:
    """Note what a row of `peer` reaches in other ranks' buffers, and in those of `rank`."""
    for owner, buffer, block in (*row.sources, *row.targets):
        if owner != peer or buffer not in (*BUFFERS, _ASIDE):
            beyond = buffer == "out" and block not in results(owner)
            made.reached.add((owner, REST if beyond else buffer))
    for cell in row.targets:
        owner, buffer, block = cell
        if owner == rank != peer:
            made.stored[phase][buffer, block] = peer
        if owner == peer and buffer not in BUFFERS:
            made.held.setdefault(cell, set()).add(row.sources[0])


def _read(rank: int, part: Sequence[Row] | Messages) -> Iterator[Cell]:
    """Yield the blocks that a part of a phase reads; those of a message as this rank's."""
    if not isinstance(part, tuple):
        for row in part:
            yield from row.sources
        return
    for step in part:
        if isinstance(step, Copy):
            yield from [(rank, step.source, block) for block in block_tuple(step.source_blocks)]
        elif isinstance(step, (Send, Reduce)):
            yield from [(rank, step.buffer, block) for block in block_tuple(step.blocks)]


def _check(rank: int, ranks: Sequence[int], step: Step) -> None:
    """Raise if a step reaches ranks of another node, or is a meeting without this rank."""
    named: Sequence[int] = ()
    if isinstance(step, Meet):
        named = step.group
        if rank not in named:
            raise ScheduleError(f"{step!r} is without this rank", rank=rank)
    elif isinstance(step, (Get, Put, Fold)):
        named = step.peers if isinstance(step, Fold) else (step.peer,)
    for peer in named:
        if peer not in ranks:
            there = ", ".join(map(str, ranks))
            raise ScheduleError(
                f"{step!r} names rank {peer}; the node has the ranks {there}", rank=rank
            )


def _check_peer(rank: int, groups: Sequence[Sequence[int]], step: Step) -> None:
    """Raise if a message is to this rank itself, or to a rank that there is not."""
    assert isinstance(step, _MESSAGES)
    if step.peer == rank:
        raise ScheduleError(f"{step!r} names this rank as its peer; use Copy", rank=rank)
    if not any(step.peer in group for group in groups):
        size = sum(map(len, groups))
        raise ScheduleError(f"{step!r} names rank {step.peer}; there are {size} ranks", rank=rank)


def _check_reach(rank: int, step: Step, memory: Memory) -> None:
    """Raise if a step reads or writes a buffer of another rank that is not to be reached."""
    if isinstance(step, Meet):
        return
    assert isinstance(step, (Get, Put, Fold))
    does, buffer = ("write", step.target) if isinstance(step, Put) else ("read", step.source)
    peers = step.peers if isinstance(step, Fold) else (step.peer,)
    reason = memory.why_not(does, buffer)
    if reason and any(peer != rank for peer in peers):
        raise ScheduleError(f"{step!r} {does}s {buffer!r} of another rank; {reason}", rank=rank)


def _flat(schedule: Schedule) -> Iterator[tuple[Step, ...]]:
    """Yield the rounds; those of strands one strand after the other, which any window allows."""
    for item in schedule:
        if isinstance(item, Parallel):
            for strand in item.strands:
                yield from _flat(strand)
        else:
            yield steps_of(item)


def _meetings(rounds: Mapping[int, Sequence[tuple[Step, ...]]]) -> list[tuple[int, ...]]:
    """Return the groups of all meetings, in an order that agrees with that of every rank."""
    ahead = {
        rank: deque(
            tuple(step.group) for steps in theirs for step in steps if isinstance(step, Meet)
        )
        for rank, theirs in rounds.items()
    }
    # The next one to take place is at the head of the queues of all its ranks:
    #     rank 0   (0 1)         (0 1 2)
    #     rank 1   (0 1)  (1 2)  (0 1 2)        (0 1), (1 2), (0 1 2)
    #     rank 2          (1 2)  (0 1 2)
    order: list[tuple[int, ...]] = []
    found = True
    while found:
        found = False
        for queue in ahead.values():
            while queue and all(ahead[r] and ahead[r][0] == queue[0] for r in queue[0]):
                order.append(queue[0])
                for r in order[-1]:
                    ahead[r].popleft()
                found = True
    for rank, queue in ahead.items():
        if queue:
            raise ScheduleError(f"the meeting of ranks {queue[0]} never takes place", rank=rank)
    return order


def _in_phases(
    rank: int, rounds: Sequence[tuple[Step, ...]], order: Sequence[tuple[int, ...]]
) -> tuple[list[list[list[Row] | Messages]], list[tuple[int, ...]]]:
    """Return the parts of a rank's phases, and the ranks that it awaits in each meeting."""
    phases: list[list[list[Row] | Messages]] = [[] for _ in range(len(order) + 1)]
    awaits: list[tuple[int, ...]] = [() for _ in order]
    at = 0
    for steps in rounds:
        if steps and isinstance(meet := steps[0], Meet):
            at = next(n for n in range(at, len(order)) if order[n] == tuple(meet.group)) + 1
            awaited = meet.group if meet.awaits is None else meet.awaits
            awaits[at - 1] = tuple([peer for peer in awaited if peer != rank])
            continue
        if any(isinstance(step, _MESSAGES) for step in steps):
            phases[at].append(tuple([s for s in steps if not isinstance(s, ONE_SIDED)]))
            steps = tuple([s for s in steps if isinstance(s, ONE_SIDED)])
        phases[at] += _rows(rank, steps)
    return phases, awaits


def _rows(rank: int, steps: Sequence[Step]) -> list[list[Row]]:
    """Return the rows of a round; in two parts if it copies between blocks that overlap."""
    first: list[Row] = []
    second: list[Row] = []
    copies: dict[Cell, Row] = {}  # by their source: it is read once for all targets
    for step in steps:
        if isinstance(step, Fold):
            first += _folded(rank, step)
            continue
        moved = _moved(rank, step)
        written = {target for _, target in moved}
        if isinstance(step, Copy) and any(source in written for source, _ in moved):
            for source, target in moved:
                held = (rank, _ASIDE, target[2])
                first.append(Row((source,), [held]))
                second.append(Row((held,), [target]))
            continue
        for source, target in moved:
            if source in copies:
                copies[source].targets.append(target)
            else:
                copies[source] = Row((source,), [target])
                first.append(copies[source])
    return [first, second] if second else [first]


def _folded(rank: int, step: Fold) -> Iterator[Row]:
    blocks = block_tuple(step.blocks)
    for block, to in zip(blocks, blocks if step.to is None else block_tuple(step.to)):
        sources = [
            (peer, step.source, block) if peer != rank or step.own is None else (rank, step.own, to)
            for peer in step.peers
        ]
        yield Row(tuple(sources), [(rank, step.target, to)], tuple(step.peers))


def _moved(rank: int, step: Step) -> list[tuple[Cell, Cell]]:
    """Return the source and the target of each block that a step copies."""
    if isinstance(step, Copy):
        reader = writer = rank
        blocks, to = block_tuple(step.source_blocks), block_tuple(step.target_blocks)
    else:
        assert isinstance(step, (Get, Put))
        reader, writer = (step.peer, rank) if isinstance(step, Get) else (rank, step.peer)
        blocks = block_tuple(step.blocks)
        to = blocks if step.to is None else block_tuple(step.to)
    return [
        ((reader, step.source, block), (writer, step.target, target))
        for block, target in zip(blocks, to)
    ]


def _joined(
    parts: Sequence[list[Row] | Messages], uses: Counter[Cell], private: str
) -> list[Row | Messages]:
    """Return the rows of one phase, in which a combination is stored where it is copied later.

    `uses` has how often this rank reads each block.  `private` is a buffer that no other rank
    reaches, or empty: a result there that is not read again need not be stored.
    """
    joined: list[Row | Messages] = []
    last: list[Row] = []  # the last round of which something is left
    folds: dict[Cell, Row] = {}  # its combinations, by their targets
    for part in parts:
        if isinstance(part, tuple):
            joined.append(part)
            last, folds = [], {}
            continue
        rest = []
        for row in part:
            fold = None if row.ranks else folds.get(row.sources[0])
            # Others have read a slot's lines since they were stored.  To copy to such lines is
            # faster than to sum to them: allreduce of 1 MiB in 58 µs, not 113, on 2 ranks.
            slot = row.targets[0][1] not in BUFFERS
            if fold is None or slot or not _apart(row, fold, last):
                rest.append(row)
                continue
            fold.targets += row.targets
            uses[row.sources[0]] -= 1
        if rest:
            joined += rest
            last, folds = rest, {row.targets[0]: row for row in rest if row.ranks}
    for row in [row for row in joined if isinstance(row, Row)]:
        first = row.targets[0]
        if row.ranks and len(row.targets) > 1 and private == first[1] and not uses[first]:
            del row.targets[0]
    return joined


def _apart(copy: Row, fold: Row, last: Iterable[Row]) -> bool:
    """Return whether a copy may be done with `fold`, before what else is in its round, `last`."""
    targets = {_memory(cell) for cell in copy.targets}
    touched = (cell for row in last if row is not fold for cell in (*row.sources, *row.targets))
    return targets.isdisjoint(map(_memory, touched))


def _memory(cell: Cell) -> Cell:
    """Return a cell with "out" for "in": in a call in place they are one."""
    rank, buffer, block = cell
    return rank, "out" if buffer == "in" else buffer, block
