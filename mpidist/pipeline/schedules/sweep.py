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
    """The results of proving one schedule for many sizes."""

    name: str
    chunks: tuple[int, ...]  # numbers of chunks on a rank that were tried
    sizes: tuple[int, ...] = ()  # numbers of ranks that were proved
    microbatches: tuple[int, ...] = ()  # numbers of microbatches that were proved
    refused: int = 0  # cases that the schedule declares it cannot serve
    proofs: int = 0
    actions: int = 0  # of all proofs together, and so are the messages
    messages: int = 0
    # largest number of messages to one rank, sent and not yet used, in any proof
    outstanding: int = 0
    seconds: float = 0.0
    counterexample: str = ""  # the first case that could not be proved, and why; or empty

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
    """Prove schedules for all combinations of these numbers; return one row for each schedule.

    By default all registered ones are proved, with 1, 2 and 3 chunks if they serve any number; each
    up to its first counter-example.  ``progress(done, total, next name)`` is called before each
    one. InvalidArgument if a schedule in `named` does not serve one of the `chunks`.
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
    began = perf_counter()
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
    row.seconds = perf_counter() - began
    return row
