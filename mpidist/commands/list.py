"""``mpidist list``: the algorithms of collectives and the schedules of pipelines."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..pipeline.schedules.schedule import describe as describe_schedule
from ..pipeline.schedules.schedule import schedules
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import algorithms, describe
from .console import examples, make_console, make_table, show
from .options import CollectiveName, load_option

PIPELINE = "pipeline"
_WIDE = 160  # columns from which there is room for the costs
_COSTS = "n bytes in the whole buffer, p ranks, m nodes, g ranks on a node; lg is to the base 2."
_NO_COSTS = (
    f"Rounds and bytes are printed in a terminal of {_WIDE} columns, in a file, and by --json."
)
_LEGEND = (
    "Ordered: combines operands in rank order, as operations that do not commute need.",
    "tree:K is a tree of arity K, for example tree:4; the name tree alone, as bench and explain "
    "print it, is that of the configured arity, 2 by default.",
    "hierarchical/LOCAL/ACROSS, and hierarchical_leaders: two levels, the algorithm LOCAL inside "
    "the nodes and ACROSS between them, for example hierarchical/direct/ring.",
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
@click.argument("collective", required=False, type=CollectiveName(PIPELINE))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@load_option
def list_command(collective: str | None, as_json: bool) -> None:
    """List the algorithms of a COLLECTIVE, or of all collectives.

    `mpidist list pipeline` lists the pipeline schedules.
    """
    of_pipelines = [describe_schedule(schedule) for schedule in schedules()]
    order = list(COLLECTIVES)
    rows = [
        describe(algorithm)
        for algorithm in sorted(algorithms(), key=lambda a: order.index(a.collective))
        if collective in (None, algorithm.collective)
    ]
    if as_json:
        click.echo(json.dumps(of_pipelines if collective == PIPELINE else rows, indent=2))
        return
    console = make_console()
    if collective != PIPELINE:
        show(console, tabulate(console, rows))
    if collective in (None, PIPELINE):
        show(console, tabulate_schedules(console, of_pipelines))
    if collective != PIPELINE:
        for line in (_COSTS if console.width >= _WIDE else _NO_COSTS, *_LEGEND):
            console.print(line)


def tabulate(console: Console, rows: list[dict[str, Any]]) -> Table:
    """Return a table of algorithms; narrow terminals get it without the costs."""
    wide = console.width >= _WIDE
    costs_of = ("rounds", "bytes per rank") if wide else ()
    table = make_table(console, "=collective", "=algorithm", *costs_of, "ordered", "summary")
    before = ""
    for row in rows:
        first = "" if row["collective"] == before and console.is_terminal else row["collective"]
        before = row["collective"]
        notes = f" (needs {row['requires']})" if row["requires"] else ""
        table.add_row(
            first,
            row["algorithm"] + (":K" if "arity" in row["uses"] else ""),
            *((row["rounds"], row["bytes_per_rank"]) if wide else ()),
            "yes" if row["ordered"] else "no",
            row["summary"] + notes,
        )
    return table


def tabulate_schedules(console: Console, rows: list[dict[str, Any]]) -> Table:
    """Return a table of pipeline schedules."""
    table = make_table(console, "=pipeline", "=chunks", "=splits B", "summary")
    for row in rows:
        chunks = f"{row['chunks']}{' or any' if row['any_chunks'] else ''}"
        splits = {True: "yes", False: "no", None: "?"}[row["splits"]]
        table.add_row(row["schedule"], chunks, splits, row["summary"])
    return table
