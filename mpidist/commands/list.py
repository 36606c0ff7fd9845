"""``mpidist list``: the algorithms of collectives and the schedules of pipelines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ..schedule.contract import COLLECTIVES
from ..schedule.registry import algorithms, describe
from ..tables import Column
from .console import examples, make_console, make_table, show
from .options import collective_name, load_option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPELINE = "pipeline"
_WIDE = 160  # columns from which there is room for the summaries; those of a file
_COSTS = "n bytes in the whole buffer, p ranks, m nodes, g ranks on a node; lg is to the base 2."
_NO_SUMMARY = f"--json prints a summary of each; so does a terminal of {_WIDE} columns."
_LEGEND = (
    "Ordered: combines operands in rank order, as operations that do not commute need.",
    "tree:K is a tree of arity K, for example tree:4; the name tree alone, as bench and explain "
    "print it, is that of the configured arity, 2 by default.",
    "hierarchical/LOCAL/ACROSS, and hierarchical_leaders: two levels, the algorithm LOCAL inside "
    "the nodes and ACROSS between them, for example hierarchical/direct/ring.",
    "in_place, published and slots: in memory that the ranks of a node share, alone or as LOCAL "
    "inside the nodes; in_place in arrays of comm.empty(), the others on any arrays.",
    "Executors without a schedule, which algorithm= accepts too: native, MPI's own "
    "collective; on one node symmetric, in arrays of comm.empty(); staged, through shared memory; "
    "and single_copy, from the memory of the other processes.",
)


@click.command(
    "list",
    short_help="List the algorithms of collectives and the schedules of pipelines.",
    epilog=examples(
        "mpidist list",
        "mpidist list allreduce --json",
        "mpidist list pipeline",
        "mpidist list --import my_algorithms.py",
    ),
)
@click.argument("collective", required=False, type=collective_name(PIPELINE))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@load_option
def list_command(collective: str | None, as_json: bool) -> None:
    """List the algorithms of a COLLECTIVE, or of all collectives.

    `mpidist list pipeline` lists the pipeline schedules.
    """
    from ..pipeline.schedules.schedule import describe as describe_schedule
    from ..pipeline.schedules.schedule import schedules

    of_pipelines = [describe_schedule(schedule) for schedule in schedules()]
    order = list(COLLECTIVES)
    rows = [
        describe(algorithm)
        for algorithm in sorted(algorithms(one_sided=True), key=lambda a: order.index(a.collective))
        if collective in (None, algorithm.collective)
    ]
    if as_json:
        click.echo(json.dumps(of_pipelines if collective == PIPELINE else rows, indent=2))
        return
    console = make_console()
    if not console.is_terminal:
        console.width = _WIDE
    if collective != PIPELINE:
        show(console, tabulate(console, rows))
    if collective in (None, PIPELINE):
        show(console, tabulate_schedules(console, of_pipelines))
    if collective != PIPELINE:
        for line in (_COSTS, *_LEGEND, *([_NO_SUMMARY] if console.width < _WIDE else [])):
            console.print(line)


def tabulate(console: Console, rows: list[dict[str, Any]]) -> Table:
    """Return a table of algorithms.

    Narrow terminals get it without the summaries, and with a line for the name of each collective.
    """
    wide = console.width >= _WIDE
    heads: list[Column | str]
    heads = [Column.names("algorithm"), "rounds", "bytes per rank", Column.names("ordered")]
    table = make_table(
        console, *([Column.names("collective"), *heads, "summary"] if wide else heads)
    )
    before = ""
    for row in rows:
        name, new = row["collective"], row["collective"] != before
        before = name
        algorithm = row["algorithm"] + (":K" if "arity" in row["uses"] else "")
        needs = f" (needs {row['requires']})" if row["requires"] else ""
        ordered = "yes" if row["ordered"] else "no"
        costs = row["rounds"], row["bytes_per_rank"]
        if wide:
            first = name if new or not console.is_terminal else ""
            table.add_row(first, algorithm, *costs, ordered, row["summary"] + needs)
        else:
            if new:
                table.add_row(f"[bold]{name}[/]")
            table.add_row(f" {algorithm}", costs[0] + needs, costs[1], ordered)
    return table


def tabulate_schedules(console: Console, rows: list[dict[str, Any]]) -> Table:
    """Return a table of pipeline schedules."""
    table = make_table(console, *map(Column.names, ("pipeline", "chunks", "splits B")), "summary")
    for row in rows:
        chunks = f"{row['chunks']}{' or any' if row['any_chunks'] else ''}"
        splits = {True: "yes", False: "no", None: "?"}[row["splits"]]
        table.add_row(row["schedule"], chunks, splits, row["summary"])
    return table
