"""``mpidist bench scaling``: collectives over 1, 2, 4, … nodes."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from ...measure import round_size
from ...schedule.contract import COLLECTIVES
from ..console import examples, make_console, make_table, progress_bar, show
from ..options import CollectiveName, load_option
from .collectives import json_option, on_step, plot_option, settings_options

if TYPE_CHECKING:
    from ...bench import Results, Row


@click.command(
    "scaling",
    short_help="Collectives over 1, 2, 4, … of the nodes, in one run.",
    epilog=examples(
        "mpidist run mpidist bench scaling --json scaling.json --plot scaling.svg",
        "mpidist run mpidist bench scaling allreduce --algorithms auto,native,hierarchical",
    ),
)
@click.argument("collectives", nargs=-1, type=CollectiveName(), metavar="[COLLECTIVE]...")
@settings_options("auto")
@json_option
@plot_option
@load_option
def scaling_command(
    collectives: tuple[str, ...], json_file: str | None, plot: str | None, **settings: Any
) -> int:
    """Measure each COLLECTIVE (by default all) over 1, 2, 4, … and all nodes, in one run.

    The exit code is 1 if any result was wrong.
    """
    import mpidist

    from ...bench import Settings
    from ...bench.plots import draw_scaling
    from ...bench.runner import measure_scaling, scaling_steps

    settings["algorithms"] = settings["algorithms"] or ("auto",)
    comm, wanted = mpidist.init(), Settings(**settings)
    names = collectives or tuple(COLLECTIVES)
    with progress_bar("measuring", scaling_steps(comm, names, wanted)) as advance:
        results = measure_scaling(comm, names, wanted, on_step(advance))
    correct = all(comm.allgather_object(results.correct))
    if comm.rank == 0:
        _print(results)
        if json_file:
            results.save(json_file)
        if plot:
            draw_scaling(results).savefig(plot, dpi=130)
    return 0 if correct else 1


def _print(results: Results) -> None:
    """Print a table for each collective: a column for each number of nodes."""
    console, nodes = make_console(), results.header["nodes"]
    for collective in dict.fromkeys(row.collective for row in results.rows):
        heads = [f">{count} node{'s' * (count > 1)}\nµs" for count in nodes.values()]
        table = make_table(console, ">bytes", "=by", *heads)
        rows = [row for row in results.rows if row.collective == collective]
        for name in dict.fromkeys(row.algorithm for row in rows):
            columns = [_column(rows, int(ranks), name) for ranks in nodes]
            for cells in zip_longest(*columns):
                nbytes = next(row.bytes for row in cells if row is not None)
                table.add_row(round_size(nbytes), name, *map(_cell, cells))
        console.print(f"\n[bold]{collective}[/]")
        show(console, table)


def _column(rows: list[Row], ranks: int, name: str) -> list[Row]:
    """Return the rows of one number of ranks, by size: bytes are multiples of the ranks."""
    found = [row for row in rows if row.ranks == ranks and row.algorithm == name]
    return sorted(found, key=lambda row: row.bytes)


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row.time_us:,.0f}" + " WRONG" * (not row.correct)
