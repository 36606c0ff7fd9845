"""``mpidist bench pipeline``: steps of a pipeline, and the cost of its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ..console import examples
from ..options import Count
from .benchmark import benchmark, device_option

if TYPE_CHECKING:
    from ...bench import Results
    from ...communicator.communicator import Communicator


@click.command(
    "pipeline",
    short_help="Measure steps of a pipeline beside PyTorch's, and its overhead.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench pipeline",
        "mpidist run -n 2 -- mpidist bench pipeline --device cuda",
    ),
)
@device_option
@click.option(
    "--iterations",
    type=Count(),
    default=40,
    show_default=True,
    help="Timed steps of each candidate.",
)
@benchmark
def pipeline_command(device: str, iterations: int) -> Callable[[Communicator], Results]:
    """Measure the overhead of a pipeline, and its steps beside torch.distributed.pipelining.

    Needs 2 or more ranks.  With --device cuda, torch's pipelining is over the backend "mpidist",
    as gloo sends no CUDA tensors; else it is over gloo, and on 4 ranks the averaging of the
    replicas' gradients is measured too.
    """
    from ...bench.pipelines import measure_pipelines

    return lambda comm: measure_pipelines(comm, iterations, device)
