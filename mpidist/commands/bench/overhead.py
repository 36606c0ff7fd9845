"""``mpidist bench overhead``: the time that mpidist itself adds to a call."""

from __future__ import annotations

import click

from ..console import examples
from .collectives import json_option, print_results, write_results


@click.command(
    "overhead",
    short_help="Time that mpidist itself adds to a call.",
    epilog=examples("mpidist run -n 2 -- mpidist bench overhead"),
)
@json_option
def overhead_command(json_file: str | None) -> int:
    """Measure the engine's time for a round, and native allreduce beside the bare mpi4py call."""
    import mpidist

    from ...bench.overhead import measure_overhead

    comm = mpidist.init()
    results = measure_overhead(comm)
    if comm.rank == 0:
        print_results(results)
        write_results(results, json_file)
    return 0
