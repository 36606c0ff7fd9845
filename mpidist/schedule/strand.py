"""A strand of one rank in the prover's machine, with its progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import ScheduleError
from .rounds import Round, Step

BlockPlace = tuple[str, int]  # buffer and block
Known = Mapping[int, int]


@dataclass(eq=False, slots=True)
class Strand:
    """One strand of one rank, and its current round.

    A strand is a schedule inside a ``parallel``, which runs beside others, or the whole schedule.

    Attributes
    ----------
    rounds : iterator
        The rounds that have not begun.
    path : tuple of int
        Number of the strand in its ``parallel``, preceded by the numbers of the enclosing strands;
        empty for the whole schedule.
    parent : Strand or None
        The strand that has the ``parallel``.
    siblings : dict or None
        For each (buffer, block) used in that ``parallel``: the number of the strand that uses it,
        and whether that strand writes it.
    clock : int
        Length of the longest chain of messages up to the current round.
    number : int
        Number of the current round, from 1.
    pending : int
        Number of the round's messages that are not complete, or of the strands of a ``parallel``
        that have not ended.
    steps : tuple
        Steps of the current round.
    received : dict
        Blocks and values of each received message, by index of the step in the round.
    thread, tick, known : int, int, dict
        Number of the strand among all strands, its count of rounds, and the counts of the others'
        rounds that are before its present one; only for schedules in shared memory, see
        :mod:`.races`.
    heard : tuple
        For each of the round's messages: `known`, number and last round of the sending strand.
    waiting : dict
        Strands of this strand's ``parallel`` that have not begun, as at most `window` run at a
        time; each by the number of the strand whose end it waits for.
    """

    rank: int
    rounds: Iterator[Round]
    path: tuple[int, ...] = ()
    parent: Strand | None = None
    siblings: dict[BlockPlace, tuple[int, bool]] | None = None
    clock: int = 0
    number: int = 0
    pending: int = 0
    steps: tuple[Step, ...] = ()
    received: dict[int, tuple[list[BlockPlace], list[int]]] = field(default_factory=dict)
    waiting: dict[int, Strand] = field(default_factory=dict)
    thread: int = field(init=False, repr=False)
    tick: int = field(init=False, repr=False)
    known: Known = field(init=False, repr=False)
    heard: tuple[tuple[Known, int, int], ...] = ()

    def touch(self, place: BlockPlace, write: bool) -> None:
        """Record a read or write of a block, given as `place`: (buffer, block).

        Raises ScheduleError if a concurrent strand writes the block, or this one writes what a
        concurrent one uses.
        """
        level: Strand | None = self
        while level is not None and level.siblings is not None:
            index = level.path[-1]
            seen = level.siblings.get(place)
            if seen is None:
                level.siblings[place] = (index, write)
            elif seen[0] != index and (write or seen[1]):
                message = f"is written in strand {index} or {seen[0]} and used in the other"
                raise self.error(message, place[1])
            elif write and not seen[1]:
                level.siblings[place] = (index, True)
            level = level.parent

    def error(self, message: str, block: int | None = None) -> ScheduleError:
        """Return a ScheduleError: rank, round and, if given, `block`, then `message` and strand."""
        path = f" (strand {'.'.join(map(str, self.path))})" if self.path else ""
        return ScheduleError(message + path, rank=self.rank, round=max(self.number, 1), block=block)
