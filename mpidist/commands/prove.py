"""``mpidist prove``: every algorithm, for every size and root."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..errors import InvalidArgument
from ..schedule.contract import COLLECTIVES
from .common import examples, make_console, make_table, show
from .options import Names, Numbers, load_option, only_for
from .prove_pipelines import ALL, PIPELINE_RANKS, as_dict, prove_pipelines
from .spans import spans


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
