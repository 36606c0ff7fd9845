"""``mpidist prove``: every algorithm, for every size and root."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from time import perf_counter
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..errors import InvalidArgument, ScheduleError
from ..pipeline.schedules.prove import prove
from ..pipeline.schedules.schedule import PipelineSchedule, as_schedule, schedules
from ..schedule.contract import COLLECTIVES
from .console import examples, make_console, make_table, show
from .options import Names, Numbers, find_pipeline, load_option, only_for


def spans(numbers: tuple[int, ...]) -> str:
    """Write numbers briefly: ``1-4, 7``; ``2, 4, … 32`` where every other one is missing."""
    parts: list[list[int]] = []
    step = numbers[1] - numbers[0] if len(numbers) > 3 else 1
    if step > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


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
    known = schedules() if names == (ALL,) else [as_schedule(find_pipeline(name)) for name in names]
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
        print_pipelines(make_console(), rows, seconds)
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


def print_pipelines(console: Console, rows: list[Row], seconds: float) -> None:
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


@click.command(
    "prove",
    short_help="Prove algorithms, for every size and root, or find what is wrong.",
    epilog=examples(
        "mpidist prove",
        "mpidist prove --ranks 1-64 --jobs 2",
        "mpidist prove --collective allreduce --algorithm tree --arity 2,5 --ranks 7,12",
        "mpidist prove --import mine.py --algorithm mine",
        "mpidist prove --pipeline",
        "mpidist prove --pipeline 1f1b,zb-v --ranks 1-16 --microbatches 1-64",
    ),
)
@click.option(
    "--ranks", type=Numbers(), default="1-33", show_default=True, help="Sizes: 1-33, or 2,5."
)
@click.option("--collective", type=Names(), help="Only these; by default all.")
@click.option("--algorithm", type=Names(), help="Only these; tree:4 is the tree of arity 4.")
@click.option("--arity", type=Numbers(), default="2,3,4,8", show_default=True, help="Of trees.")
@click.option(
    "--pipeline",
    type=Names(),
    is_flag=False,
    flag_value=ALL,
    metavar="[NAMES]",
    help="Pipeline schedules, all or these; or MODULE:FUNCTION, a generator of yours.",
)
@click.option(
    "--microbatches", type=Numbers(), default="1-16", show_default=True, help="Pipelines."
)
@click.option(
    "--chunks", type=Numbers(), help="Of pipelines that serve any number; by default 1-3."
)
@click.option("--jobs", type=int, help="Processes; by default one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@load_option
@click.pass_context
def prove_command(
    context: click.Context,
    ranks: list[int],
    collective: tuple[str, ...] | None,
    algorithm: tuple[str, ...] | None,
    arity: list[int],
    pipeline: tuple[str, ...] | None,
    microbatches: list[int],
    chunks: list[int] | None,
    jobs: int | None,
    as_json: bool,
    imports: Any,
) -> int:
    """Prove algorithms: run all ranks symbolically, for every size, root, arity and grouping.

    A proof shows that nothing deadlocks, that every contribution arrives exactly once, and where an
    algorithm says so that operands combine in rank order.  A counter-example names rank, round and
    block, and makes the exit code 1.

    With --pipeline: that every microbatch goes once through every stage, in an order that keeps
    its messages apart and cannot deadlock.  A counter-example names rank, stage and step.
    """
    if pipeline is not None:
        only_for(context, "algorithms of collectives", "collective", "algorithm", "arity", "jobs")
        given = context.get_parameter_source("ranks") is ParameterSource.COMMANDLINE
        return prove_pipelines(
            pipeline, ranks if given else PIPELINE_RANKS, microbatches, chunks, as_json
        )
    only_for(context, "pipeline schedules: give --pipeline", "microbatches", "chunks")
    from ..schedule.sweep import sweep

    for name, values, least in (("--ranks", ranks, 1), ("--arity", arity, 2)):
        if min(values) < least:
            raise InvalidArgument(f"{name} {min(values)}: allowed are whole numbers >= {least}")
    if jobs is not None and jobs < 1:
        raise InvalidArgument(f"--jobs {jobs}: allowed are whole numbers >= 1")
    begun = perf_counter()
    with proving() as progress:
        rows = sweep(ranks, collective, algorithm, arity, jobs, progress)
    seconds = perf_counter() - begun
    rows.sort(key=lambda row: list(COLLECTIVES).index(row.collective))
    if as_json:
        click.echo(json.dumps(as_dict(rows, seconds), indent=1))
    else:
        print_rows(make_console(), rows, seconds)
    return 0 if all(row.proved for row in rows) else 1


def print_rows(console: Console, rows: list[Any], seconds: float) -> None:
    """Print a line for each algorithm, the counter-examples, and the totals."""
    table = make_table(
        console, "=collective", "=algorithm", "ranks", ">proofs", ">messages", ">s", "proved"
    )
    for row in rows:
        notes = f" (not {spans(row.refused)})" if row.refused and row.sizes else ""
        table.add_row(
            row.collective,
            Text(row.name),
            (spans(row.sizes) or "none") + notes,
            f"{row.proofs:,}",
            f"{row.messages:,}",
            f"{row.seconds:.2f}",
            "yes" if row.proved else "NO",
            style=None if row.proved else "bold red",
        )
    show(console, table)
    for row in rows:
        if not row.proved:
            console.print(
                f"counter-example: {row.collective} {row.name}: {row.counterexample}",
                markup=False,
                style="red",
            )
    wrong = sum(not row.proved for row in rows)
    console.print(
        f"{len(rows)} algorithms, {sum(row.proofs for row in rows):,} proofs of "
        f"{sum(row.messages for row in rows):,} messages in {seconds:.1f} s: "
        + (f"{wrong} NOT proved" if wrong else "all proved")
    )


@contextmanager
def proving() -> Iterator[Callable[[int, int, str], None] | None]:
    """Show on a terminal how far it is."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(
        TextColumn("proving"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, label: bar.update(
            task, completed=done, total=total, description=label
        )
