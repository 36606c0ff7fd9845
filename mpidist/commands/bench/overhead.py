"""``mpidist bench overhead``: the time that mpidist itself adds to a call."""

from __future__ import annotations

import click

from ..console import examples, progress_bar
from .collectives import files_options, report_results, watched


@click.command(
    "overhead",
    short_help="Measure the time that mpidist itself adds to a call.",
    epilog=examples("mpidist run -n 2 -- mpidist bench overhead"),
)
@files_options
def overhead_command(json_file: str | None, csv_file: str | None) -> int:
    """Measure the engine's time for a round, and native allreduce beside the bare mpi4py call."""
    import mpidist

    from ...bench.overhead import measure_overhead

    comm = mpidist.init()
    machine = watched(comm)
    with progress_bar("measuring"):
        results = measure_overhead(comm)
    machine.end(results)
    if comm.rank == 0:
        report_results(results, json_file, csv_file)
    return 0
