"""``mpidist bench --scaling``: the same over 1, 2, 4 … nodes."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from ..measure import round_size
from .common import make_console, make_table, show
from .info import knobs, versions
from .progress import measuring


def print_scaling(
    collectives: tuple[str, ...], settings: Any, json_file: str | None, plot: str | None
) -> int:
    """Measure, print a table, write the JSON and the plot; 1 if any result was wrong."""
    import mpidist

    from ..bench import steps
    from ..bench.records import make_header
    from ..bench.scaling import draw_scaling, measure_scaling, node_counts

    comm = mpidist.init()
    turns = len(node_counts(comm.topology.num_nodes))
    with measuring(turns * steps(collectives, settings)) as step:
        results = measure_scaling(comm, collectives, settings, step)
    about = make_header(comm, versions(), knobs())
    results.header = {**about, **results.header, "iterations": results.iterations}
    right = all(comm.allgather_object(results.correct))
    if comm.rank == 0:
        _print(results)
        if json_file:
            results.save(json_file)
        if plot:
            draw_scaling(results).savefig(plot, dpi=130)
    return 0 if right else 1


def _print(results: Any) -> None:
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


def _column(rows: list[Any], ranks: int, name: str) -> list[Any]:
    """Give the rows of one number of ranks by size: bytes are rounded to multiples of the ranks."""
    found = [row for row in rows if row.ranks == ranks and row.algorithm == name]
    return sorted(found, key=lambda row: row.bytes)


def _cell(row: Any) -> str:
    return "" if row is None else f"{row.time_us:,.0f}" + " WRONG" * (not row.correct)
