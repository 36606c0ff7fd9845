"""``mpidist bench torch``: collectives of torch.distributed."""

from __future__ import annotations

import click

from ..console import examples
from ..options import ByteSizes, Count
from .collectives import files_options, report_results, watched


@click.command(
    "torch",
    short_help="Measure torch.distributed over mpidist beside gloo.",
    epilog=examples("mpidist run -n 2 -- mpidist bench torch all_reduce --bytes 4,64K,4M"),
)
@click.argument(
    "collectives",
    nargs=-1,
    type=click.Choice(["all_reduce", "all_gather", "broadcast"]),
    metavar="[COLLECTIVE]...",
)
@click.option(
    "--bytes",
    "sizes",
    type=ByteSizes(),
    default="4,1K,64K,1M,4M,16M",
    show_default=True,
    help="Sizes of the whole buffer.",
)
@click.option(
    "--iterations", type=Count(), default=15, show_default=True, help="Timed blocks of calls."
)
@files_options
def torch_command(
    collectives: tuple[str, ...],
    sizes: list[int],
    iterations: int,
    json_file: str | None,
    csv_file: str | None,
) -> int:
    """Measure collectives of torch.distributed with the backend "mpidist", and with gloo.

    COLLECTIVE is all_reduce, all_gather or broadcast; by default all three.  The candidates take
    turns; "x gloo" is the time of gloo divided by this time: above 1 is faster.  The exit code is 1
    if any result was wrong.
    """
    import mpidist

    from ...bench.training import NO_TORCH, ranks_have
    from ...errors import Unsupported

    comm = mpidist.init()
    if not ranks_have(comm, "torch", "torch.distributed"):
        raise Unsupported(NO_TORCH)
    from ...bench.torch_collectives import measure_torch

    machine = watched(comm)
    results = measure_torch(comm, collectives, sizes, iterations)
    machine.end(results)
    if comm.rank == 0:
        report_results(results, json_file, csv_file)
    return 0 if results.correct else 1
