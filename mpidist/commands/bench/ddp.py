"""``mpidist bench ddp``: steps of data-parallel training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..console import examples, make_console, make_table, show
from ..options import POSITIVE, Millions, check_not_given
from .collectives import json_option

if TYPE_CHECKING:
    from ...bench.training import Overlapped, Row

MISSING = "PyTorch is not installed: pip install 'mpidist\\[torch]' to measure it too"


@click.command(
    "ddp",
    short_help="Steps of data-parallel training beside PyTorch's.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench ddp --parameters 4,50",
        "mpidist run -n 2 -- mpidist bench ddp --overlap",
    ),
)
@click.option(
    "--parameters",
    type=Millions(),
    default="4,17",
    show_default=True,
    metavar="MILLIONS",
    help="Parameters of the networks.",
)
@click.option(
    "--overlap",
    is_flag=True,
    help="Measure steps of two fixed networks with each kind of overlap, and with auto.",
)
@click.option(
    "--iterations",
    type=POSITIVE,
    metavar="N",
    default=20,
    show_default=True,
    help="Timed steps of each kind.",
)
@json_option
@click.pass_context
def ddp_command(
    context: click.Context,
    parameters: list[float],
    overlap: bool,
    iterations: int,
    json_file: str | None,
) -> int:
    """Measure steps of data-parallel training.

    With mpidist.DDP, without communication, with one allreduce per parameter, and with PyTorch's
    own wrapper over gloo; without PyTorch only the averaging of small gradients.
    """
    if overlap:
        check_not_given(context, ("parameters",), "steps without --overlap")
    import mpidist

    from ...bench.results import write_json
    from ...bench.training import measure_overlap, measure_steps

    comm = mpidist.init()
    found = (
        measure_overlap(comm, iterations)
        if overlap
        else measure_steps(comm, iterations, parameters)
    )
    if comm.rank == 0:
        (_print_overlap if overlap else print_rows)(found.rows)
        for note in found.notes if found.has_torch else [MISSING, *found.notes]:
            make_console().print(note)
        if json_file:
            write_json(json_file, found.as_json())
    return 0


def print_rows(rows: list[Row]) -> None:
    """Print the table of steps."""
    console = make_console()
    table = make_table(console, "what", "by", ">ms", ">time of ours / this")
    for row in rows:
        table.add_row(row.work, row.name, f"{1e3 * row.seconds:.3f}", f"{row.ratio:.2f}")
    show(console, table)


def _print_overlap(rows: list[Overlapped]) -> None:
    """Print the table of steps with each kind of overlap."""
    console = make_console()
    table = make_table(console, "step", "overlap", ">ms", ">least ms", ">time / none", ">hidden %")
    for row in rows:
        hidden = "" if row.hidden is None else f"{100 * row.hidden:.0f}"
        times = [f"{1e3 * seconds:.2f}" for seconds in (row.seconds, row.least)]
        table.add_row(row.work, row.name, *times, f"{row.share:.2f}", hidden)
    show(console, table)
