"""``mpidist bench ddp``: steps of data-parallel training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ..console import examples
from ..options import MILLIONS, Count, check_only, only
from .benchmark import benchmark, device_option

MODEL_NAMES = ("gpt2", "bert", "resnet18", "lstm", "moe")  # of bench.models, not imported here

if TYPE_CHECKING:
    from ...bench import Results
    from ...communicator.communicator import Communicator
MODEL_STEPS, PLAIN_STEPS = "steps without --overlap", "steps without --overlap or --model"


@click.command(
    "ddp",
    short_help="Measure steps of data-parallel training beside PyTorch's.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench ddp --model gpt2 --model moe",
        "mpidist run -n 2 -- mpidist bench ddp --parameters 4,50",
        "mpidist run -n 2 -- mpidist bench ddp --overlap",
        "mpidist run -n 2 -- mpidist bench ddp --check-replicas",
        "mpidist run -n 2 --survive -- mpidist bench ddp --model gpt2 --elastic",
        "mpidist run -n 2 -- mpidist bench ddp --device cuda --parameters 50",
    ),
)
@only(
    MODEL_STEPS,
    click.option(
        "--model",
        "models",
        multiple=True,
        type=click.Choice(MODEL_NAMES),
        help="Real model to measure, with random weights; may be repeated.",
    ),
    click.option(
        "--check-replicas",
        is_flag=True,
        help="Measure mpidist.DDP with a comparison of the replicas in every step, too, and the "
        "comparison alone.",
    ),
    click.option(
        "--elastic",
        is_flag=True,
        help="Measure mpidist.DDP with the State of md.elastic and a commit() in every step, too, "
        "and the commit() alone.",
    ),
    device_option,
)
@only(
    PLAIN_STEPS,
    click.option(
        "--parameters",
        type=MILLIONS,
        default="4,17",
        show_default=True,
        metavar="MILLIONS",
        help="Without --model: sizes of plain networks of linear layers, in millions of "
        "parameters.",
    ),
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
@click.pass_context
@benchmark
def ddp_command(
    context: click.Context,
    parameters: list[float],
    models: tuple[str, ...],
    check_replicas: bool,
    elastic: bool,
    device: str,
    overlap: bool,
    iterations: int,
) -> Callable[[Communicator], Results]:
    """Measure steps of data-parallel training.

    With --model, real models: PyTorch's DistributedDataParallel over mpidist and over gloo, with
    gradient_as_bucket_view ("views"), over gloo also without.  gpt2, bert, resnet18, lstm and moe
    (a mixture of experts) are small ones with random weights.

    Without it, plain networks of linear layers: mpidist.DDP, training without communication, one
    allreduce per parameter, and DistributedDataParallel over gloo.  Without PyTorch, only the
    averaging of small gradients is measured.
    """
    uses = () if overlap else (MODEL_STEPS,) if models else (MODEL_STEPS, PLAIN_STEPS)
    check_only(context, *uses)
    from ...bench.training import measure_models, measure_overlap, measure_steps

    if overlap:
        return lambda comm: measure_overlap(comm, iterations)
    more = device, check_replicas, elastic
    if models:
        return lambda comm: measure_models(comm, iterations, models, *more)
    return lambda comm: measure_steps(comm, iterations, parameters, *more)
