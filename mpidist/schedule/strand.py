"""One strand of one rank in the prover's machine: where it is, what it shares with its siblings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import ScheduleError
from .rounds import Round, Step

Place = tuple[str, int]  # buffer and block


@dataclass(eq=False, slots=True)
class Strand:
    """One strand of one rank, and the round it is in.

    Attributes
    ----------
    path : tuple of int
        Its number in the ``parallel`` that opened it, after the numbers of the strands around it.
    siblings : dict or None
        Which strand of that ``parallel`` uses a place, and whether any writes it.
    clock : int
        Messages on the longest chain that led here.
    number : int
        The round, counted from 1.
    pending : int
        Messages of the round that have not moved, or strands that have not ended.
    received : dict
        By the step's place in the round: where the message belongs, and its values.
    waiting : dict
        Strands that have no room in the window, by the one whose end they wait for.
    """

    rank: int
    rounds: Iterator[Round]
    path: tuple[int, ...] = ()
    parent: Strand | None = None
    siblings: dict[Place, tuple[int, bool]] | None = None
    clock: int = 0
    number: int = 0
    pending: int = 0
    steps: tuple[Step, ...] = ()
    received: dict[int, tuple[list[Place], list[int]]] = field(default_factory=dict)
    waiting: dict[int, Strand] = field(default_factory=dict)

    def touch(self, place: Place, write: bool) -> None:
        """Note who uses a block; strands of one ``parallel`` must not write what others use."""
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
        """Give an error that names this rank, its round and strand, and the block."""
        path = f" (strand {'.'.join(map(str, self.path))})" if self.path else ""
        return ScheduleError(message + path, rank=self.rank, round=max(self.number, 1), block=block)
