"""``mpidist bench``: every algorithm beside the bare mpi4py call."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ..bench.results import knobs, versions
from ..errors import InvalidArgument
from ..measure import round_size
from .bench_training import (
    check_not_for_collectives,
    device_option,
    print_on_device,
    print_pipelines,
    print_training,
)
from .console import examples, make_console, make_table, measuring, show
from .options import (
    Names,
    Sizes,
    check_alone,
    check_collectives,
    check_files,
    check_scaling,
    load_option,
    make_settings,
)


def print_collectives(
    collectives: tuple[str, ...],
    settings: Any,
    stream: bool | None,
    json_file: str | None,
    plot: str | None,
    report: str | None,
) -> int:
    """Measure, print, and write what was asked for; 1 if any result was wrong.

    `stream` says whether the speed of memory is measured too; None: with symmetric memory.
    """
    import mpidist

    from ..bench import measure, steps
    from ..bench.memory import measure_stream

    comm = mpidist.init()
    with measuring(steps(collectives, settings)) as step:
        results = measure(comm, collectives, settings, step)
    results.header = header(comm, results)
    if settings.memory != "private" if stream is None else stream:
        results.header["stream"] = measure_stream(comm).as_header()
    if comm.rank == 0:
        print_results(results)
        write(results, json_file, plot, report)
    return 0 if results.correct else 1


def header(comm: Any, results: Any) -> dict[str, Any]:
    """Give the header of results."""
    from ..bench.results import make_header

    return {**make_header(comm, versions(), knobs()), "iterations": results.iterations}


def print_results(results: Any, console: Console | None = None) -> None:
    """Print the tables."""
    from ..bench.memory import describe_stream
    from ..bench.results import BOUND_NOTE, bound_percent, tabulate

    console = console or make_console()
    speed = describe_stream(results.header)
    if speed:
        console.print(f"{speed}")
    make, narrow = partial(make_table, console), console.width < 90
    for heading, table in tabulate(results, make, console.is_terminal, narrow):
        console.print(f"\n[bold]{heading}[/]" if heading else "")
        show(console, table)
    if any(bound_percent(row, results.header) is not None for row in results.rows):
        console.print(f"{BOUND_NOTE}, {results.header['stream']['gbs']:.1f} GB/s")


def write(results: Any, json_file: str | None, plot: str | None, report: str | None) -> None:
    """Write what was asked for."""
    if json_file:
        results.save(json_file)
    if plot:
        from ..bench.plots import save

        save(results, plot)
    if report:
        from ..bench.report import bench_page

        Path(report).write_text(bench_page(results), encoding="utf-8")


def print_comparison(first: str, second: str) -> int:
    """Print two runs beside each other; needs no MPI."""
    from ..bench.compare import NOISE, compare, read, tabulate

    console = make_console()
    comparison = compare(read(first), read(second))
    console.print(f"first: {first}\nsecond: {second}")
    narrow = console.width < 110
    for heading, table in tabulate(comparison, partial(make_table, console), narrow):
        console.print(f"\n[bold]{heading}[/]")
        show(console, table)
    verdicts = [pair.verdict.partition(",")[0] for pair in comparison.pairs]
    console.print(
        f"\n{len(verdicts)} in both: {verdicts.count('better')} better, "
        f"{verdicts.count('worse')} worse, beyond {100 * NOISE:.0f} % or the spread of the "
        "iterations; ratio: time of the first over that of the second, above 1 it is faster now"
    )
    return 0


def print_overhead() -> int:
    """Print the engine's cost of a round and native's beside the bare call."""
    import mpidist

    from ..bench.overhead import engine_overhead, native_overhead

    comm = mpidist.init()
    costs = [*(engine_overhead() if comm.rank == 0 else []), *native_overhead(comm)]
    console = make_console()
    table = make_table(console, "what", ">deadline", ">µs", ">more than bare µs")
    bare = next(c.microseconds for c in costs if c.what.startswith("mpi4py"))
    for cost in costs:
        more = f"{cost.microseconds - bare:.2f}" if cost.what.startswith("native") else ""
        deadline = "none" if cost.timeout is None else f"{cost.timeout:g} s"
        table.add_row(cost.what, deadline, f"{cost.microseconds:.2f}", more)
    show(console, table)
    return 0


def print_scaling(
    collectives: tuple[str, ...], settings: Any, json_file: str | None, plot: str | None
) -> int:
    """Measure, print a table, write the JSON and the plot; 1 if any result was wrong."""
    import mpidist

    from ..bench import steps
    from ..bench.plots import draw_scaling
    from ..bench.results import make_header
    from ..bench.runner import measure_scaling, node_counts

    comm = mpidist.init()
    turns = len(node_counts(comm.topology.num_nodes))
    with measuring(turns * steps(collectives, settings)) as step:
        results = measure_scaling(comm, collectives, settings, step)
    about = make_header(comm, versions(), knobs())
    results.header = {**about, **results.header, "iterations": results.iterations}
    right = all(comm.allgather_object(results.correct))
    if comm.rank == 0:
        _print_scaling(results)
        if json_file:
            results.save(json_file)
        if plot:
            draw_scaling(results).savefig(plot, dpi=130)
    return 0 if right else 1


def _print_scaling(results: Any) -> None:
    console, nodes = make_console(), results.header["nodes"]
    for collective in dict.fromkeys(row.collective for row in results.rows):
        heads = [f">{count} node{'s' * (count > 1)}\nµs" for count in nodes.values()]
        table = make_table(console, ">bytes", "=by", *heads)
        rows = [row for row in results.rows if row.collective == collective]
        for name in dict.fromkeys(row.algorithm for row in rows):
            columns = [_column(rows, int(ranks), name) for ranks in nodes]
            for cells in zip_longest(*columns):
                nbytes = next(row.bytes for row in cells if row is not None)
                table.add_row(round_size(nbytes), name, *map(_cell, cells))
        console.print(f"\n[bold]{collective}[/]")
        show(console, table)


def _column(rows: list[Any], ranks: int, name: str) -> list[Any]:
    """Give the rows of one number of ranks by size: bytes are rounded to multiples of the ranks."""
    found = [row for row in rows if row.ranks == ranks and row.algorithm == name]
    return sorted(found, key=lambda row: row.bytes)


def _cell(row: Any) -> str:
    return "" if row is None else f"{row.time_us:,.0f}" + " WRONG" * (not row.correct)


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
