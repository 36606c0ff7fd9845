"""``mpidist bench collectives``: every algorithm beside the bare mpi4py call."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...measure import format_size
from ...schedule.contract import COLLECTIVES
from ..console import examples, make_console, print_tables, progress_bar
from ..options import (
    CALLED,
    DTYPE,
    OUTPUT_OR_STDOUT,
    PAGE,
    SIZES,
    STDOUT,
    Count,
    Seconds,
    algorithm_names,
    collective_name,
    load_option,
    picture,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ...bench import Results
    from ...bench.machine import Watch
    from ...communicator.communicator import Communicator


def files_options(command: Callable) -> Callable:
    """Decorate a command with the options of files that every benchmark writes: --json, --csv."""
    for name in ("CSV, a line for each row", "JSON"):
        kind = name.partition(",")[0].lower()
        command = click.option(
            f"--{kind}",
            f"{kind}_file",
            type=OUTPUT_OR_STDOUT,
            metavar="FILE",
            help=f"Write the results as {name}; - prints them instead of the table.",
        )(command)
    return command


sizes_option = click.option(
    "--bytes",
    "sizes",
    type=SIZES,
    default="8,64K,1M",
    show_default=True,
    help="Sizes of the whole buffer; 8-64M is 8, 32, 128, … 64M.",
)
dtype_option = click.option(
    "--dtype", type=DTYPE, default="float32", show_default=True, help="Dtype of the elements."
)
plot_option = click.option(
    "--plot", type=picture(), metavar="FILE", help="Draw the results (.png, .svg, .pdf)."
)
report_option = click.option("--report", type=PAGE, metavar="FILE", help="Write an HTML page.")

_SETTINGS = (
    dtype_option,
    click.option(
        "--op", default="sum", metavar="NAME", show_default=True, help="Operation of reductions."
    ),
    click.option(
        "--root", default=0, metavar="RANK", show_default=True, help="Root of rooted collectives."
    ),
    click.option("--in-place", is_flag=True, help="Write the result over the input."),
    click.option(
        "--iterations",
        type=Count(),
        default=200,
        show_default=True,
        help="Maximum number of timed iterations for each collective and size.",
    ),
    click.option(
        "--budget",
        type=Seconds(),
        default=2.0,
        show_default=True,
        help="Time for each collective and size.",
    ),
    click.option(
        "--limit",
        type=Seconds(),
        default=30.0,
        show_default=True,
        help="Time after which a measurement is cut short.",
    ),
)


def settings_options(default: str, memory: str) -> Callable[[Callable], Callable]:
    """Return a decorator that adds the options of :class:`~mpidist.bench.Settings`.

    Parameters
    ----------
    default : str
        The algorithms that are measured by default, as words for the help.
    memory : str
        Default of ``--memory``.
    """
    named = click.option(
        "--algorithms",
        type=algorithm_names(COLLECTIVES, *CALLED, one_sided=True),
        help=f"Algorithms to measure; by default {default}.",
    )
    places = click.option(
        "--memory",
        type=click.Choice(["auto", "private", "symmetric", "both"]),
        default=memory,
        show_default=True,
        help="Memory of the arrays: all private, all symmetric (of comm.empty), each candidate in "
        "both, or only auto in both (auto).  Those of the bare mpi4py call are always private.",
    )
    options = (sizes_option, named, places, *_SETTINGS)
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


@click.command(
    "collectives",
    short_help="Measure every algorithm beside the bare mpi4py call.",
    epilog=examples(
        "mpidist run -n 4 -- mpidist bench allreduce --bytes 8,64K,1M,64M",
        "mpidist run -n 2 -- mpidist bench allgather alltoall --algorithms native,ring,pairwise",
        "mpidist run -n 4 -- mpidist bench allreduce --bytes 8-64M --plot a.png --json a.json",
        "mpidist run -n 4 -- mpidist bench allreduce --import mine.py --algorithms ring,mine",
        "mpidist run -n 2 -- mpidist bench allreduce --bytes 64K-64M --algorithms auto --in-place",
    ),
)
@click.argument(
    "collectives", nargs=-1, required=True, type=collective_name(), metavar="COLLECTIVE..."
)
@settings_options("native, auto, all executors and algorithms", memory="auto")
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Measure the memory bandwidth too; by default with --memory symmetric and both.",
)
@files_options
@plot_option
@report_option
@load_option
def collectives_command(
    collectives: tuple[str, ...],
    stream: bool | None,
    json_file: str | None,
    csv_file: str | None,
    plot: str | None,
    report: str | None,
    **settings: Any,
) -> int:
    """Measure every algorithm of each COLLECTIVE beside the bare mpi4py call, in one run.

    The data change in every iteration, and every result is checked.  A time is the median over
    the iterations of the slowest rank's time; "x mpi4py" is the time of the bare call divided by
    it: above 1 is faster.  "used" is the time of writing the input, the call and the first reading
    of the result, together.  The exit code is 1 if any result was wrong.
    """
    import mpidist

    from ...bench import Settings, run_benchmark, steps

    comm, wanted = mpidist.init(), Settings(**settings)
    machine = watched(comm)
    with progress_bar("measuring", steps(collectives, wanted)) as advance:
        results = run_benchmark(comm, collectives, wanted, on_step(advance), stream)
    machine.end(results)
    if comm.rank == 0:
        report_results(results, json_file, csv_file, plot, report)
    return 0 if results.correct else 1


def on_step(advance: Callable[[str], None]) -> Callable[[str, int], None]:
    """Return a benchmark's `on_step` callback: it advances a bar, naming collective and size."""
    return lambda collective, nbytes: advance(f"{collective} {format_size(nbytes)}")


def print_results(results: Results, console: Console | None = None) -> None:
    """Print the tables and notes of any benchmark."""
    from ...bench.results import tables

    console = console or make_console()
    print_tables(console, tables(results))
    for note in results.notes:
        console.print(note, markup=False)


def report_results(
    results: Results,
    json_file: str | None = None,
    csv_file: str | None = None,
    plot: str | None = None,
    report: str | None = None,
) -> None:
    """Print the results, and write the files given; for ``-``, print JSON or CSV instead.

    It is for rank 0.
    """
    texts = (json_file, results.to_json), (csv_file, results.to_csv)
    if STDOUT not in (json_file, csv_file):
        print_results(results)
    for name, text in texts:
        if name == STDOUT:
            click.echo(text().rstrip("\n"))
        elif name:
            Path(name).write_text(text(), encoding="utf-8")
    if plot:
        from ...bench.report import draw, save

        save(draw(results), plot)
    if report:
        from ...bench.report import bench_page

        Path(report).write_text(bench_page(results), encoding="utf-8")


def watched(comm: Communicator) -> Watch:
    """Look at the machine before a measurement, and warn of each busy node; collective.

    Busy is a node where other processes use over 15 % of the cores.
    """
    from ...bench.machine import Watch, busy_text

    machine = Watch(comm).begin()
    for node in machine.busy:
        make_console(stderr=True).print(busy_text(*node), style="yellow")
    return machine
