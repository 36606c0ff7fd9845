"""``mpidist explain``: what "auto" will do, and why."""

from __future__ import annotations

from typing import Any

import click

from ..measure import format_size
from .common import examples, make_console, make_table, show
from .options import Size, load_option


@click.command(
    "explain",
    epilog=examples(
        "mpidist explain allreduce --bytes 64M",
        "mpidist run -n 4 -- mpidist explain allgather --bytes 8K",
    ),
)
@click.argument("collective")
@click.option(
    "--bytes", "nbytes", type=Size(), default="1M", show_default=True, help="Whole buffer."
)
@click.option("--op", default="sum", show_default=True, help="Operation, where it reduces.")
@load_option
def explain_command(collective: str, nbytes: int, op: str, imports: Any) -> None:
    """Say which algorithm "auto" takes for COLLECTIVE, why, and what each other one could do."""
    import mpidist

    comm = mpidist.init()
    chosen, every = comm.explain(collective, nbytes, op)
    console = make_console()
    console.print(
        f"{collective}, {format_size(nbytes)} bytes of float32, {comm.size} rank"
        f"{'s' * (comm.size > 1)} on {comm.topology.num_nodes} "
        f"node{'s' * (comm.topology.num_nodes > 1)}: [bold]{chosen.name}[/]\n{chosen.why}"
    )
    table = make_table(console, "=way", "can", "why")
    for way in every:
        style = "bold" if way.name == chosen.name else "" if way.can else "dim"
        table.add_row(way.name, "yes" if way.can else "no", way.why, style=style)
    show(console, table)
