"""``mpidist bench gpu``: each executor of arrays on a GPU, and the copies that it needs."""

from __future__ import annotations

from typing import Any

import click

from ..console import examples
from ..options import Count, collective_name
from .collectives import (
    dtype_option,
    files_options,
    report_results,
    sizes_option,
    watched,
)


@click.command(
    "gpu",
    short_help="Measure each executor of arrays on a GPU beside bare copies.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench gpu allreduce --bytes 64K-64M --json gpu.json"
    ),
)
@click.argument("collectives", nargs=-1, type=collective_name(), metavar="[COLLECTIVE]...")
@sizes_option
@dtype_option
@click.option(
    "--iterations",
    type=Count(),
    default=200,
    show_default=True,
    help="Timed iterations.",
)
@files_options
def gpu_command(
    collectives: tuple[str, ...],
    sizes: list[int],
    dtype: Any,
    iterations: int,
    json_file: str | None,
    csv_file: str | None,
) -> int:
    """Measure collectives of arrays on a GPU by each available executor, and the copies alone.

    COLLECTIVE is allreduce, reduce_scatter, allgather or broadcast; by default all four.  The
    exit code is 1 if any result was wrong.
    """
    import mpidist

    from ...bench.gpu import measure_gpu

    comm = mpidist.init()
    machine = watched(comm)
    results = measure_gpu(comm, collectives, sizes, dtype, iterations)
    machine.end(results)
    if comm.rank == 0:
        report_results(results, json_file, csv_file)
    return 0 if results.correct else 1
