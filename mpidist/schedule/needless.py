"""Meetings that a schedule could do without: each is left out, and the rest proved again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScheduleError
from .prove import prove
from .registry import Algorithm, Groups, find
from .rounds import Meet, Parallel, Round, Schedule, steps_of
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


@dataclass(frozen=True)
class Needless:
    """A meeting that an algorithm could do without, and the numbers of ranks for which it could."""

    collective: str
    name: str
    meeting: str
    sizes: tuple[int, ...]


Keep = Callable[[Meeting], bool]


def find_needless(
    collective: str, name: str, sizes: Iterable[int], arity: int = 2
) -> list[Needless]:
    """Return the meetings that an algorithm could do without, for these sizes that it serves.

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
        for meeting in needless_meetings(algorithm, size, rooted, arity, nodes):
            found.setdefault(meeting.text(size), []).append(size)
    return [Needless(collective, name, text, tuple(served)) for text, served in found.items()]


def needless_meetings(
    algorithm: Algorithm,
    size: int,
    roots: Sequence[int] = (0,),
    arity: int = 2,
    groups: Groups | None = None,
) -> list[Meeting]:
    """Return the meetings of an algorithm without each of which it is still proved.

    Each of them can be left out alone; two of them perhaps not together.  A meeting is named if no
    root needs it.  Meetings of a rank with itself are not: they wait for nobody.

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
    return sorted(set.intersection(*every))


def _needless(
    algorithm: Algorithm, size: int, root: int, arity: int, groups: Groups | None
) -> set[Meeting]:
    met: set[Meeting] = set()

    def proved(keep: Keep) -> None:
        kept = replace(algorithm, function=_keeping(algorithm.function, keep))
        prove(algorithm.collective, kept, size, root, arity=arity, groups=groups)

    def note(meeting: Meeting) -> bool:
        met.add(meeting)
        return True

    proved(note)
    needless = set()
    for meeting in met:
        try:
            proved(meeting.__ne__)
        except ScheduleError:
            continue
        needless.add(meeting)
    return needless


def _keeping(function: Callable[..., Schedule], keep: Keep) -> Callable[..., Schedule]:
    """Return a generator function whose schedules have only those meetings that `keep` accepts."""

    def kept(rank: int, size: int, **given: Any) -> Schedule:
        return _kept(function(rank, size, **given), keep, (), Counter())

    return kept


def _kept(schedule: Schedule, keep: Keep, path: tuple[int, ...], counts: Counter) -> list[Round]:
    rounds: list[Round] = []
    for item in schedule:
        if isinstance(item, Parallel):
            strands = [_kept(s, keep, (*path, k), counts) for k, s in enumerate(item.strands)]
            rounds.append(Parallel(tuple(strands), item.window))
            continue
        step = next(iter(steps_of(item)), None)
        if isinstance(step, Meet):
            group = tuple(step.group)
            counts[path, group] += 1
            if len(group) > 1 and not keep(Meeting(path, group, counts[path, group])):
                continue
        rounds.append(item)
    return rounds
