"""``mpidist bench pipeline``: steps of a pipeline, and the cost of its engine."""

from __future__ import annotations

import click

from ..console import examples, progress_bar
from ..options import Count
from .collectives import files_options, report_results, watched


@click.command(
    "pipeline",
    short_help="Measure steps of a pipeline beside PyTorch's, and its overhead.",
    epilog=examples("mpidist run -n 2 -- mpidist bench pipeline"),
)
@click.option(
    "--iterations",
    type=Count(),
    default=40,
    show_default=True,
    help="Timed steps of each candidate.",
)
@files_options
def pipeline_command(iterations: int, json_file: str | None, csv_file: str | None) -> int:
    """Measure the overhead of a pipeline, and its steps beside torch.distributed.pipelining.

    Needs 2 or more ranks.  On 4 ranks the averaging of the replicas' gradients is measured too.
    """
    import mpidist

    from ...bench.pipelines import measure_pipelines

    comm = mpidist.init()
    machine = watched(comm)
    with progress_bar("measuring"):
        results = measure_pipelines(comm, iterations)
    machine.end(results)
    if comm.rank == 0:
        report_results(results, json_file, csv_file)
    return 0
