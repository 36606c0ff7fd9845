"""``mpidist bench ddp``: steps of data-parallel training."""

from __future__ import annotations

import click

from ..console import examples, progress_bar
from ..options import MILLIONS, Count, check_not_given
from .collectives import files_options, report_results, watched

MODELS = ("gpt2", "bert", "resnet18", "lstm", "moe")  # of bench.models, not imported here


@click.command(
    "ddp",
    short_help="Measure steps of data-parallel training beside PyTorch's.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench ddp --model gpt2 --model moe",
        "mpidist run -n 2 -- mpidist bench ddp --parameters 4,50",
        "mpidist run -n 2 -- mpidist bench ddp --overlap",
    ),
)
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(MODELS),
    help="Real model to measure, with random weights; may be repeated.",
)
@click.option(
    "--parameters",
    type=MILLIONS,
    default="4,17",
    show_default=True,
    metavar="MILLIONS",
    help="Without --model: sizes of plain networks of linear layers, in millions of parameters.",
)
@click.option(
    "--overlap",
    is_flag=True,
    help="Compare the values of DDP(overlap=) on two fixed networks instead.",
)
@click.option(
    "--iterations",
    type=Count(),
    default=20,
    show_default=True,
    help="Timed steps of each candidate.",
)
@files_options
@click.pass_context
def ddp_command(
    context: click.Context,
    parameters: list[float],
    models: tuple[str, ...],
    overlap: bool,
    iterations: int,
    json_file: str | None,
    csv_file: str | None,
) -> int:
    """Measure steps of data-parallel training.

    With --model, real models: PyTorch's DistributedDataParallel over mpidist and over gloo, with
    gradient_as_bucket_view ("views"), over gloo also without.  gpt2, bert, resnet18, lstm and moe
    (a mixture of experts) are small ones with random weights.

    Without it, plain networks of linear layers: mpidist.DDP, training without communication, one
    allreduce per parameter, and DistributedDataParallel over gloo.  Without PyTorch, only the
    averaging of small gradients is measured.
    """
    if overlap:
        check_not_given(context, ("parameters", "models"), "steps without --overlap")
    if models:
        check_not_given(context, ("parameters",), "steps without --model")
    import mpidist

    from ...bench.training import measure_models, measure_overlap, measure_steps

    comm = mpidist.init()
    machine = watched(comm)
    with progress_bar("measuring"):
        if overlap:
            results = measure_overlap(comm, iterations)
        elif models:
            results = measure_models(comm, iterations, models)
        else:
            results = measure_steps(comm, iterations, parameters)
    machine.end(results)
    if comm.rank == 0:
        report_results(results, json_file, csv_file)
    return 0
