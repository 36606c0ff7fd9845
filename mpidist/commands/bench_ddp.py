"""``mpidist bench ddp``: data-parallel training beside PyTorch's own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..errors import InvalidArgument
from .common import make_console, make_table, show
from .info import knobs, versions
from .options import check_writable

NAME = "ddp"
OPTIONS = ("iterations", "json_file")
WIDTHS = (1024, 2048)  # 4.2 and 16.8 million parameters


def print_training(iterations: int, json_file: str | None) -> int:
    """Measure and print."""
    import mpidist

    from ..bench.records import make_header
    from ..bench.training import communication

    check_options()
    if iterations < 1:
        raise InvalidArgument(f"--iterations {iterations}: allowed are numbers >= 1")
    check_writable("--json", json_file)
    comm = mpidist.init()
    have = comm.broadcast_object(importlib.util.find_spec("torch") is not None)
    rows, notes = [], []
    if have:
        from ..bench.training_torch import training

        for width in WIDTHS:
            more, stats = training(comm, iterations, width)
            rows += more
            notes.append(f"{more[0].work}: {describe(stats)}")
    if comm.size > 1:
        rows += communication(comm, iterations)
    library = {"torch": importlib.metadata.version("torch")} if have else {}
    header = make_header(comm, {**versions(), **library}, knobs())
    if comm.rank == 0:
        print_rows(rows, have)
        for note in notes:
            make_console().print(note)
        if json_file:
            content = {"header": header, "rows": [row.as_json() for row in rows], "notes": notes}
            Path(json_file).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


def check_options() -> None:
    """Raise InvalidArgument where an option of the other benchmarks is given."""
    context = click.get_current_context()
    others = [
        parameter.opts[0]
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and parameter.name not in OPTIONS
        and context.get_parameter_source(parameter.name or "") == ParameterSource.COMMANDLINE
    ]
    if others or context.params["collectives"] != (NAME,):
        raise InvalidArgument(
            f"bench {NAME} stands alone; allowed are --iterations and --json"
            + (f", not {', '.join(others)}" if others else ", and no collective")
        )


def describe(stats: Any) -> str:
    """Say which way of overlapping was taken, after what trials, and where the time went."""
    parts = ("compute", "exposed", "hidden")
    times = ", ".join(f"{part} {1e3 * getattr(stats, part):.2f} ms" for part in parts)
    trials = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in stats.trials.items())
    tried = f" after steps of {trials}" if trials else ""
    return f"overlap {stats.overlap!r}{tried}; {times}"


def print_rows(rows: list[Any], have_torch: bool) -> None:
    """Print the table."""
    console = make_console()
    if not have_torch:
        console.print(
            "PyTorch is not installed: pip install 'mpidist\\[torch]' measures it as well"
        )
    table = make_table(console, "what", "by", ">ms", ">time of ours / this")
    for row in rows:
        table.add_row(row.work, row.name, f"{1e3 * row.seconds:.3f}", f"{row.ratio:.2f}")
    show(console, table)
