"""``mpidist bench COLLECTIVE...``: its tables, and the files that are asked for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from .common import make_console, make_table, show
from .info import knobs, versions
from .progress import measuring


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
    from ..bench.stream import measure_stream

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
    from ..bench.records import make_header

    return {**make_header(comm, versions(), knobs()), "iterations": results.iterations}


def print_results(results: Any, console: Console | None = None) -> None:
    """Print the tables."""
    from ..bench.stream import BOUND_NOTE, bound_percent, describe_stream
    from ..bench.table import tabulate

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
        from ..bench.plot import save

        save(results, plot)
    if report:
        from ..bench.report import bench_page

        Path(report).write_text(bench_page(results), encoding="utf-8")
