"""What all benchmarks have in common: options of files, a look at the machine, a bar, a report."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...measure import format_size
from ..console import make_console, print_tables, progress_bar
from ..options import OUTPUT_OR_STDOUT, PAGE, STDOUT, picture

if TYPE_CHECKING:
    from rich.console import Console

    from ...bench import Results
    from ...bench.machine import Watch
    from ...communicator.communicator import Communicator

plot_option = click.option(
    "--plot", type=picture(), metavar="FILE", help="Draw the results (.png, .svg, .pdf)."
)
device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),  # of bench.device, not imported here
    default="cpu",
    show_default=True,
    help="Where tensors and models are; cuda is a GPU, which ranks may share.",
)
report_option = click.option("--report", type=PAGE, metavar="FILE", help="Write an HTML page.")


def benchmark(command: Callable[..., Callable[[Communicator], Results]]) -> Callable[..., int]:
    """Decorate a command that returns a function of a communicator, which measures; collective.

    The command checks its options first.  Then all ranks start, look at the machine, and measure;
    rank 0 draws the bar and reports, to the files of --json and --csv too, and to those of --plot
    and --report where the command has such options.  The exit code is 1 if any result was wrong.
    """

    @wraps(command)
    def run(
        *context: click.Context,
        json_file: str | None,
        csv_file: str | None,
        plot: str | None = None,
        report: str | None = None,
        **options: Any,
    ) -> int:
        measure = command(*context, **options)
        import mpidist

        comm = mpidist.init()
        machine = watched(comm)
        with progress_bar("measuring"):
            results = measure(comm)
        machine.end(results)
        correct = all(comm.allgather_object(results.correct))  # rank 0 may have more rows
        if comm.rank == 0:
            report_results(results, json_file, csv_file, plot, report)
        return 0 if correct else 1

    for name in ("CSV, a line for each row", "JSON"):
        kind = name.partition(",")[0].lower()
        run = click.option(
            f"--{kind}",
            f"{kind}_file",
            type=OUTPUT_OR_STDOUT,
            metavar="FILE",
            help=f"Write the results as {name}; - prints them instead of the table.",
        )(run)
    return run


def on_step(total: int) -> Callable[[str, int], None]:
    """Return a measurement's `on_step` callback: it advances the bar, by one of `total` steps."""
    from ...bench.progress import advance

    return lambda collective, nbytes: advance(f"{collective} {format_size(nbytes)}", None, total)


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
        from ...bench.report import draw, draw_scaling, save

        save((draw_scaling if results.benchmark == "scaling" else draw)(results), plot)
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
