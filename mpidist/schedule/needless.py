"""Meetings and words that a schedule could do without: each is left out, and the rest proved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from operator import ne
from typing import Any

from ..errors import ScheduleError
from .prove import prove
from .registry import Algorithm, Groups, find
from .rounds import (
    Meet,
    Parallel,
    Recv,
    Reduce,
    Round,
    Schedule,
    Send,
    Signal,
    Step,
    Wait,
    block_tuple,
    steps_of,
)
from .sweep import EVERY_ROOT, groupings


@dataclass(frozen=True, order=True)
class Meeting:
    """A meeting of a schedule.

    Attributes
    ----------
    path : tuple of int
        The strand that meets; empty outside a ``parallel``.
    group : tuple of int
        The ranks that meet.
    number : int
        It is the n-th meeting of this group in this strand, from 1.
    """

    path: tuple[int, ...]
    group: tuple[int, ...]
    number: int

    def text(self, size: int) -> str:
        """Return its name in a schedule of `size` ranks, as ``"meeting 2 of all ranks"``."""
        ranks = f"ranks {', '.join(map(str, self.group))}"
        ranks = "all ranks" if len(self.group) == size else ranks
        strand = f" in strand {'.'.join(map(str, self.path))}" if self.path else ""
        return f"meeting {self.number} of {ranks}{strand}"


@dataclass(frozen=True, order=True)
class Word:
    """A Signal and its Wait, or a Send and its Recv without blocks.

    Attributes
    ----------
    source, target : int
        The ranks that send it, and that wait for it.
    where : str
        What it is: the channel of a Signal, or the strand of a message.
    number : int
        It is the n-th from the one to the other there, messages with blocks counted too; from 1.
    """

    source: int
    target: int
    where: str
    number: int

    def text(self, size: int) -> str:
        """Return its name, as ``"signal on full, number 2 of rank 0 to rank 1"``."""
        return f"{self.where} {self.number} of rank {self.source} to rank {self.target}"


@dataclass(frozen=True)
class Needless:
    """What an algorithm could do without, and the numbers of ranks for which it could."""

    collective: str
    name: str
    what: str
    sizes: tuple[int, ...]


Keep = Callable[[Meeting | Word], bool]


def find_needless(
    collective: str, name: str, sizes: Iterable[int], arity: int = 2
) -> list[Needless]:
    """Return the meetings and words that an algorithm could do without, for sizes that it serves.

    One that knows nodes is tried with nodes of two ranks, or another grouping that it serves.  Of
    more than 16 ranks, only the first, middle and last are roots.  Raises ScheduleError if the
    algorithm is wrong.
    """
    choice = find(collective, name)
    algorithm, arity = choice.algorithm, choice.arity or arity
    found: dict[str, list[int]] = {}
    for size in sizes if algorithm.memory is not None else ():
        roots = range(size) if size <= EVERY_ROOT else (0, size // 2, size - 1)
        every = groupings(size) if "groups" in algorithm.uses else [(tuple(range(size)),)]
        served = [groups for groups in every if algorithm.unsupported(size, groups) is None]
        nodes = next((g for g in served if len(g[0]) == 2), served[0] if served else None)
        if nodes is None:
            continue
        rooted = roots if algorithm.contract.rooted else (0,)
        for step in needless_steps(algorithm, size, rooted, arity, nodes):
            found.setdefault(step.text(size), []).append(size)
    return [Needless(collective, name, text, tuple(served)) for text, served in found.items()]


def needless_steps(
    algorithm: Algorithm,
    size: int,
    roots: Sequence[int] = (0,),
    arity: int = 2,
    groups: Groups | None = None,
) -> list[Meeting | Word]:
    """Return the meetings and words of an algorithm without each of which it is still proved.

    Each of them can be left out alone; two of them perhaps not together.  One is named if no root
    needs it.  Meetings of a rank with itself are not: they wait for nobody.

    Parameters
    ----------
    algorithm : Algorithm
        One with the steps of shared memory; what has no meeting needs none.
    size : int
        Number of ranks.
    roots : sequence of int
        The roots.
    arity, groups
        As for :func:`~mpidist.schedule.prove`.

    Raises
    ------
    ScheduleError
        If the algorithm itself is wrong: the counter-example.
    """
    every = [_needless(algorithm, size, root, arity, groups) for root in roots]
    found = set.intersection(*every)
    return sorted(found, key=lambda step: (isinstance(step, Word), astuple(step)))


def _needless(
    algorithm: Algorithm, size: int, root: int, arity: int, groups: Groups | None
) -> set[Meeting | Word]:
    met: set[Meeting | Word] = set()

    def proved(keep: Keep) -> None:
        kept = replace(algorithm, function=_keeping(algorithm.function, keep))
        prove(algorithm.collective, kept, size, root, arity=arity, groups=groups)

    def note(step: Meeting | Word) -> bool:
        met.add(step)
        return True

    proved(note)
    needless = set()
    for step in met:
        try:
            proved(partial(ne, step))
        except ScheduleError:
            continue
        needless.add(step)
    return needless


def _keeping(function: Callable[..., Schedule], keep: Keep) -> Callable[..., Schedule]:
    """Return a generator function whose schedules have only those steps that `keep` accepts."""

    def kept(rank: int, size: int, **given: Any) -> Schedule:
        return _kept(function(rank, size, **given), keep, rank, (), Counter())

    return kept


def _kept(
    schedule: Schedule, keep: Keep, rank: int, path: tuple[int, ...], counts: Counter
) -> list[Round]:
    rounds: list[Round] = []
    for item in schedule:
        if isinstance(item, Parallel):
            every = enumerate(item.strands)
            strands = [_kept(s, keep, rank, (*path, k), counts) for k, s in every]
            rounds.append(Parallel(tuple(strands), item.window))
            continue
        steps = steps_of(item)
        left = tuple([step for step in steps if _stays(step, keep, rank, path, counts)])
        if left or not steps:
            rounds.append(left)
    return rounds


def _stays(step: Step, keep: Keep, rank: int, path: tuple[int, ...], counts: Counter) -> bool:
    """Return whether a step stays: all do but meetings and words that `keep` does not accept."""
    what: Meeting | Word
    if isinstance(step, Meet):
        group = tuple(step.group)
        counts[path, group] += 1
        what = Meeting(path, group, counts[path, group])
        return len(group) < 2 or keep(what)
    if not isinstance(step, (Send, Recv, Reduce, Signal, Wait)):
        return True
    ends = (rank, step.peer) if isinstance(step, (Send, Signal)) else (step.peer, rank)
    way: tuple[Any, ...]
    if isinstance(step, (Signal, Wait)):
        way, empty, where = ("signal", step.channel), True, f"signal on {step.channel}, number"
    else:
        strand = f" in strand {'.'.join(map(str, path))}" if path else ""
        way, empty, where = path, not block_tuple(step.blocks), f"message{strand}, number"
    side = isinstance(step, (Send, Signal))
    counts[side, way, ends] += 1
    return not empty or keep(Word(*ends, where, counts[side, way, ends]))
