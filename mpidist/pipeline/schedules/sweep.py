"""``sweep``: prove pipeline schedules for many sizes, microbatches and chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from time import perf_counter

from ...errors import InvalidArgument, ScheduleError
from ...measure import counted
from .prove import prove
from .schedule import PipelineSchedule, as_schedule, schedules

CHUNKS = (1, 2, 3)  # by default, of schedules that serve any number


@dataclass
class PipelineProofRow:
    """The results of proving one schedule for many sizes.

    Attributes
    ----------
    name : str
        The schedule.
    chunks, sizes, microbatches : tuple of int
        Numbers of chunks on a rank that were tried; numbers of ranks and of microbatches that were
        proved.
    refused : int
        Number of cases that the schedule declares it cannot serve.
    proofs, actions, messages : int
        Number of proofs; of actions and of messages in all proofs together.
    outstanding : int
        The largest number of messages to one rank that can be sent and not yet used, in any proof.
    seconds : float
        Time of all proofs.
    counterexample : str
        The first case that could not be proved, and the reason; empty if there is none.
    """

    name: str
    chunks: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()
    refused: int = 0
    proofs: int = 0
    actions: int = 0
    messages: int = 0
    outstanding: int = 0
    seconds: float = 0.0
    counterexample: str = ""

    @property
    def proved(self) -> bool:
        """Whether at least one case was proved, and every served case was."""
        return not self.counterexample and self.proofs > 0


def sweep(
    ranks: Sequence[int],
    microbatches: Sequence[int],
    chunks: Sequence[int] | None = None,
    named: Sequence[PipelineSchedule | Callable] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> list[PipelineProofRow]:
    """Prove schedules for all combinations of these numbers.

    Parameters
    ----------
    ranks, microbatches : sequence of int
        Numbers of ranks and of microbatches.
    chunks : sequence of int, optional
        Chunks on each rank, for schedules that serve any number; by default 1, 2 and 3.
    named : sequence of PipelineSchedule or callable, optional
        The schedules; by default all that are registered.
    progress : callable, optional
        Called with schedules done, schedules in all, and the name of the next one.

    Returns
    -------
    list of PipelineProofRow
        One for each schedule; a schedule is proved up to its first counter-example.

    Raises
    ------
    InvalidArgument
        If a schedule in `named` does not serve one of the `chunks`.
    """
    found = schedules() if named is None else [as_schedule(one) for one in named]
    if chunks is not None and named is not None:
        for schedule in found:
            _check_chunks(schedule, chunks)
    rows: list[PipelineProofRow] = []
    for schedule in found:
        progress(len(rows), len(found), schedule.name)
        rows.append(_prove_one(schedule, ranks, microbatches, CHUNKS if chunks is None else chunks))
    return rows


def _check_chunks(schedule: PipelineSchedule, chunks: Sequence[int]) -> None:
    wrong = [number for number in chunks if number != schedule.chunks]
    if wrong and not schedule.any_chunks:
        able = [known.name for known in schedules() if known.any_chunks]
        raise InvalidArgument(
            f"chunks {wrong[0]}: pipeline schedule {schedule.name} has {schedule.chunks} on each "
            f"rank; any number is possible with {', '.join(able)}"
        )


def _prove_one(
    schedule: PipelineSchedule,
    ranks: Sequence[int],
    microbatches: Sequence[int],
    chunks: Sequence[int],
) -> PipelineProofRow:
    """Prove one schedule for all combinations of these numbers, up to the first counter-example."""
    row = PipelineProofRow(
        schedule.name, tuple(chunks) if schedule.any_chunks else (schedule.chunks,)
    )
    begun = perf_counter()
    sizes, counts = set(), set()
    for size, count, chunk in product(ranks, microbatches, row.chunks):
        if schedule.unsupported(size, count, chunk) is not None:
            row.refused += 1
            continue
        try:
            proof = prove(schedule, size, count, chunk)
        except ScheduleError as error:
            of = f", {chunk} chunks" if chunk > 1 else ""
            sizes_of = f"{counted(size, 'rank')}, {counted(count, 'microbatch', 'es')}"
            row.counterexample = f"{sizes_of}{of}: {error}"
            break
        sizes.add(size)
        counts.add(count)
        row.proofs += 1
        row.actions += proof.actions
        row.messages += proof.messages
        row.outstanding = max(row.outstanding, *proof.outstanding)
    row.sizes, row.microbatches = tuple(sorted(sizes)), tuple(sorted(counts))
    row.seconds = perf_counter() - begun
    return row
