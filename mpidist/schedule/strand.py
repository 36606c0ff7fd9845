"""A strand of one rank in the prover's machine, with its progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ScheduleError
from .rounds import Named, Round, Schedule, Step

BlockPlace = tuple[str, int]  # buffer and block
Known = Mapping[int, int]


@dataclass(eq=False, slots=True)
class Strand:
    """One strand of one rank, and its current round.

    A strand is a schedule inside a ``parallel``, which runs beside others, or the whole schedule.
    `path` is its number in its ``parallel``, which the strand `parent` has, after the numbers of
    the enclosing ones; empty for the whole schedule.
    """

    rank: int
    rounds: Iterator[Round]  # that have not begun
    path: tuple[int, ...] = ()
    parent: Strand | None = None
    # For each block used in its `parallel`: the number of the strand, and whether it writes it.
    siblings: dict[BlockPlace, tuple[int, bool]] | None = None
    clock: int = 0  # length of the longest chain of messages up to the current round
    number: int = 0  # of the current round, from 1
    pending: int = 0  # messages of the round, or strands of a `parallel`, that have not ended
    steps: tuple[Step, ...] = ()  # of the current round
    # Blocks and values of each received message, by index of the step in the round.
    received: dict[int, tuple[list[BlockPlace], list[int]]] = field(default_factory=dict)
    # Strands of its own `parallel` that have not begun, as at most `window` run at a time; each by
    # the number of the strand whose end it waits for.
    waiting: dict[int, Strand] = field(default_factory=dict)
    # In shared memory, see races.py: the strand's number among all, its count of rounds, and the
    # counts of the others' rounds that are before its present one.
    thread: int = field(init=False, repr=False)
    tick: int = field(init=False, repr=False)
    known: Known = field(init=False, repr=False)
    begun: Known = field(init=False, repr=False)  # `known` when it began
    # For each of the round's messages: `known`, `thread` and last round of the sending strand.
    heard: tuple[tuple[Known, int, int], ...] = ()
    names: Sequence[str] = ()  # of its rounds, if they have names of their own

    @classmethod
    def of(cls, rank: int, schedule: Schedule, *args: Any) -> Strand:
        """Return a strand that runs a schedule; `args` are the fields from `path` on."""
        strand = cls(rank, iter(schedule), *args)
        if isinstance(schedule, Named):
            strand.names = schedule.names
        return strand

    def name(self, number: int) -> str | None:
        """Return the name of a round; None if it has only its number."""
        return self.names[number - 1] if 0 < number <= len(self.names) else None

    def touch(self, place: BlockPlace, write: bool) -> None:
        """Record a read or write of a block, given as `place`: (buffer, block).

        Raises ScheduleError if a concurrent strand writes the block, or this one writes what a
        concurrent one uses.
        """
        # At each enclosing `parallel` in turn, of which another strand may use the block.
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

    def error(
        self, message: str, block: int | None = None, number: int | None = None
    ) -> ScheduleError:
        """Return a ScheduleError: rank, round and, if given, `block`, then `message` and strand.

        The round is the current one, or the one with this number.
        """
        number = max(self.number if number is None else number, 1)
        name = self.name(number)
        if name is not None:
            error = ScheduleError(f"{name}: {message}")
            error.rank, error.round, error.block = self.rank, number, block
            return error
        path = f" (strand {'.'.join(map(str, self.path))})" if self.path else ""
        return ScheduleError(message + path, rank=self.rank, round=number, block=block)
