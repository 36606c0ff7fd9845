"""``mpidist bench ddp``: steps of data-parallel training."""

from __future__ import annotations

import click

from ..console import examples
from ..options import Count, Millions, check_not_given
from .collectives import files_options, report_results, warn_if_busy


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
    type=Count(),
    default=20,
    show_default=True,
    help="Timed steps of each kind.",
)
@files_options
@click.pass_context
def ddp_command(
    context: click.Context,
    parameters: list[float],
    overlap: bool,
    iterations: int,
    json_file: str | None,
    csv_file: str | None,
) -> int:
    """Measure steps of data-parallel training.

    With mpidist.DDP, without communication, with one allreduce per parameter, and with PyTorch's
    own wrapper over gloo; without PyTorch only the averaging of small gradients.
    """
    if overlap:
        check_not_given(context, ("parameters",), "steps without --overlap")
    import mpidist

    from ...bench.training import measure_overlap, measure_steps

    comm = mpidist.init()
    warn_if_busy(comm)
    results = (
        measure_overlap(comm, iterations)
        if overlap
        else measure_steps(comm, iterations, parameters)
    )
    if comm.rank == 0:
        report_results(results, json_file, csv_file)
    return 0
