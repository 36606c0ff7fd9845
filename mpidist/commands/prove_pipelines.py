"""``mpidist prove --pipeline``: pipeline schedules, for many sizes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import product
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ..errors import InvalidArgument, ScheduleError
from ..pipeline.prove import prove
from ..pipeline.schedule import PipelineSchedule, as_schedule, schedules
from .common import make_console, make_table, show
from .pipelines import find
from .spans import spans

ALL = "all"
PIPELINE_RANKS = list(range(1, 9))
CHUNKS = [1, 2, 3]


@dataclasses.dataclass
class Row:
    """What was shown of one schedule; `sizes` are those proved, `refused` those not served."""

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
        """Every case that it serves is proved, and there is one."""
        return not self.counterexample and self.proofs > 0


def prove_pipelines(
    names: tuple[str, ...],
    ranks: list[int],
    microbatches: list[int],
    chunks: list[int] | None,
    as_json: bool,
) -> int:
    """Prove schedules for all these numbers, print what was shown; give the exit code.

    `chunks` are for schedules that serve any number of them; None is a few.
    """
    for name, values in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if values is not None and min(values) < 1:
            raise InvalidArgument(f"--{name} {min(values)}: allowed are whole numbers >= 1")
    known = schedules() if names == (ALL,) else [as_schedule(find(name)) for name in names]
    if chunks is not None and names != (ALL,):
        for schedule in known:
            check_chunks(schedule, chunks)
    chunks = CHUNKS if chunks is None else chunks
    begun = perf_counter()
    rows = [prove_one(schedule, ranks, microbatches, chunks) for schedule in known]
    seconds = perf_counter() - begun
    if as_json:
        click.echo(json.dumps(as_dict(rows, seconds), indent=1))
    else:
        print_rows(make_console(), rows, seconds)
    return 0 if all(row.proved for row in rows) else 1


def check_chunks(schedule: PipelineSchedule, chunks: list[int]) -> None:
    """Raise InvalidArgument if a schedule that was named would be proved for none, or others."""
    wrong = [number for number in chunks if number != schedule.chunks]
    if wrong and not schedule.any_chunks:
        able = [known.name for known in schedules() if known.any_chunks]
        raise InvalidArgument(
            f"--chunks {spans(tuple(wrong))}: pipeline schedule {schedule.name} has "
            f"{schedule.chunks} a rank, allowed is that; any number is served by {', '.join(able)}"
        )


def prove_one(
    schedule: PipelineSchedule, ranks: list[int], microbatches: list[int], chunks: list[int]
) -> Row:
    """Prove one schedule; stop at the first counter-example."""
    row = Row(schedule.name, tuple(chunks) if schedule.any_chunks else (schedule.chunks,))
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
            sizes_of = f"{size} rank{'s' * (size > 1)}, {count} microbatch{'es' * (count > 1)}"
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


def as_dict(rows: Sequence[Any], seconds: float) -> dict[str, Any]:
    """Give the rows and their totals, as JSON has them."""
    return {
        "proved": all(row.proved for row in rows),
        "proofs": sum(row.proofs for row in rows),
        "messages": sum(row.messages for row in rows),
        "seconds": round(seconds, 3),
        "rows": [dataclasses.asdict(row) | {"proved": row.proved} for row in rows],
    }


def print_rows(console: Console, rows: list[Row], seconds: float) -> None:
    """Print a line for each schedule, the counter-examples, and the totals."""
    heads = ("=pipeline", "chunks", "ranks", "microbatches", ">proofs", ">messages")
    table = make_table(console, *heads, ">most\noutstanding", ">s", "proved")
    for row in rows:
        table.add_row(
            Text(row.name),
            spans(row.chunks),
            spans(row.sizes) or "none",
            spans(row.microbatches) or "none",
            f"{row.proofs:,}",
            f"{row.messages:,}",
            str(row.outstanding),
            f"{row.seconds:.2f}",
            "yes" if row.proved else "NO",
            style=None if row.proved else "bold red",
        )
    show(console, table)
    for row in rows:
        if row.counterexample:
            line = f"counter-example: pipeline schedule {row.name}: {row.counterexample}"
            console.print(line, markup=False, style="red")
    wrong = sum(not row.proved for row in rows)
    proofs = sum(row.proofs for row in rows)
    console.print(
        f"{len(rows)} schedule{'s' * (len(rows) != 1)}, {proofs:,} proof{'s' * (proofs != 1)} of "
        f"{sum(row.messages for row in rows):,} messages in {seconds:.1f} s: "
        + (f"{wrong} NOT proved" if wrong else "all proved")
    )
