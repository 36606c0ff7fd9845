"""``mpidist bench``: every algorithm beside the bare mpi4py call."""

from __future__ import annotations

from typing import Any

import click

from ..errors import InvalidArgument
from .bench_checks import check_alone, check_files, check_scaling, make_settings
from .bench_collectives import print_collectives
from .bench_compare import print_comparison
from .bench_ddp import check_not_for_collectives, print_training
from .bench_device import device_option, print_on_device
from .bench_overhead import print_overhead
from .bench_pipeline import print_pipelines
from .bench_scaling import print_scaling
from .catalogue import check_collectives
from .common import examples
from .options import Names, Sizes, load_option


@click.command(
    "bench",
    short_help="Measure every algorithm beside the bare mpi4py call.",
    epilog=examples(
        "mpidist run -n 4 -- mpidist bench allreduce --bytes 8,64K,1M,64M",
        "mpidist run -n 2 -- mpidist bench allgather alltoall --algorithms native,ring,pairwise",
        "mpidist run -n 4 -- mpidist bench allreduce --bytes 8-64M --plot a.png --json a.json",
        "mpidist run -n 4 -- mpidist bench allreduce --import mine.py --algorithms ring,mine",
        "mpidist run -n 2 -- mpidist bench allreduce --memory both --bytes 64K-64M --in-place",
        "mpidist run -n 4 -- mpidist bench --scaling --json scaling.json --plot scaling.svg",
        "mpidist run -n 2 -- mpidist bench --overhead",
        "mpidist run -n 2 -- mpidist bench ddp --parameters 4,50",
        "mpidist run -n 2 -- mpidist bench ddp --overlap",
        "mpidist run -n 2 -- mpidist bench pipeline",
        "mpidist run -n 2 -- mpidist bench allreduce --device cuda --bytes 64K-64M",
        "mpidist bench --compare before.json after.json",
    ),
)
@click.argument("collectives", nargs=-1, metavar="COLLECTIVE...")
@click.option(
    "--bytes",
    "sizes",
    type=Sizes(),
    default="8,64K,1M",
    show_default=True,
    help="Sizes of the whole buffer; 8-64M is 8, 32, 128, … 64M.",
)
@click.option("--algorithms", type=Names(), help="By default native and all there are.")
@click.option("--dtype", default="float32", show_default=True, help="Of the elements.")
@click.option("--op", default="sum", show_default=True, help="Operation, where it reduces.")
@click.option("--root", default=0, show_default=True, help="Root, where there is one.")
@click.option("--in-place", is_flag=True, help="The result takes the memory of the input.")
@click.option(
    "--memory",
    type=click.Choice(["private", "symmetric", "both"]),
    default="private",
    show_default=True,
    help="Where the arrays are; those of the bare mpi4py call are always private.",
)
@click.option("--iterations", default=200, show_default=True, help="At most so many are timed.")
@click.option("--budget", default=2.0, show_default=True, help="Seconds for a collective and size.")
@click.option(
    "--limit", default=30.0, show_default=True, help="Seconds after which it is cut short."
)
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write the results.")
@click.option("--plot", type=click.Path(), metavar="FILE", help="Draw them (.png, .svg, .pdf).")
@click.option("--report", type=click.Path(), metavar="FILE", help="Write them as a page of HTML.")
@click.option(
    "--scaling",
    is_flag=True,
    help="Over 1, 2, 4 … of the nodes, in one run; by default all collectives, and auto.",
)
@click.option(
    "--overhead", is_flag=True, help="Measure what mpidist itself costs, and nothing else."
)
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Measure the speed of memory as well; by default with symmetric memory.",
)
@click.option(
    "--parameters",
    default="4,17",
    show_default=True,
    metavar="MILLIONS",
    help="Of the networks that ddp trains.",
)
@click.option(
    "--overlap", is_flag=True, help="Of ddp: steps with and without overlap, and what auto takes."
)
@click.option(
    "--compare",
    type=(str, str),
    metavar="FILE FILE",
    help="Compare the JSON of two runs, and measure nothing.",
)
@device_option
@load_option
def bench_command(
    collectives: tuple[str, ...],
    device: str | None,
    scaling: bool,
    overhead: bool,
    stream: bool | None,
    parameters: str,
    overlap: bool,
    compare: tuple[str, str] | None,
    json_file: str | None,
    plot: str | None,
    report: str | None,
    imports: Any,
    **options: Any,
) -> int:
    """Measure COLLECTIVEs: every algorithm beside the bare mpi4py call, in one run.

    Data are other in every iteration and every result is checked.  A time is the median over the
    iterations of the slowest rank's; "x mpi4py" is the bare call's time over it: above 1 is faster.
    The exit code is 1 if any result was wrong.

    `ddp` in place of COLLECTIVEs measures steps of data-parallel training beside PyTorch's own, by
    default 20 of each kind; `pipeline` those of a pipeline, and what its engine costs.
    """
    for name, alone in (("--compare", compare), ("--overhead", overhead)):
        if alone:
            check_alone(name)
    if compare:
        return print_comparison(*compare)
    if overhead:
        return print_overhead()
    if device:
        sizes, dtype, iterations = (options[name] for name in ("sizes", "dtype", "iterations"))
        return print_on_device(collectives, sizes, dtype, iterations, json_file)
    if "ddp" in collectives:
        return print_training(options["iterations"], json_file, parameters, overlap)
    if "pipeline" in collectives:
        return print_pipelines(options["iterations"], json_file)
    check_not_for_collectives()
    check_files(json_file, plot=plot, report=report)
    if scaling:
        check_scaling(report, stream)
        options["algorithms"] = options["algorithms"] or ("auto",)
        return print_scaling(
            tuple(check_collectives(collectives)), make_settings(**options), json_file, plot
        )
    if not collectives:
        raise InvalidArgument(
            f"no collective was named; allowed are {', '.join(check_collectives(()))}"
        )
    named = tuple(check_collectives(collectives))
    return print_collectives(named, make_settings(**options), stream, json_file, plot, report)
