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
from .bench_checks import check_only
from .common import make_console, make_table, show
from .info import knobs, versions
from .options import check_writable

NAME = "ddp"
OPTIONS = ("iterations", "json_file", "parameters", "overlap")
ALLOWED = "--iterations, --json, --parameters and --overlap"
ITERATIONS = 20
MISSING = "PyTorch is not installed: pip install 'mpidist\\[torch]' measures it as well"


def print_training(iterations: int, json_file: str | None, parameters: str, overlap: bool) -> int:
    """Measure and print."""
    import mpidist

    from ..bench.records import make_header

    check_options(overlap)
    sizes = millions(parameters)
    if not given("iterations"):
        iterations = ITERATIONS
    if iterations < 1:
        raise InvalidArgument(f"--iterations {iterations}: allowed are numbers >= 1")
    check_writable("--json", json_file)
    comm = mpidist.init()
    have = comm.broadcast_object(importlib.util.find_spec("torch") is not None)
    if overlap:
        rows, notes = measure_overlap(comm, iterations, have)
    else:
        rows, notes = measure_steps(comm, iterations, have, sizes)
    library = {"torch": importlib.metadata.version("torch")} if have else {}
    header = make_header(comm, {**versions(), **library}, knobs())
    if comm.rank == 0:
        (print_overlap if overlap else print_rows)(rows)
        for note in notes if have else [MISSING, *notes]:
            make_console().print(note)
        if json_file:
            content = {"header": header, "rows": [row.as_json() for row in rows], "notes": notes}
            Path(json_file).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


def measure_steps(
    comm: Any, iterations: int, have: bool, sizes: list[float]
) -> tuple[list[Any], list[str]]:
    """Measure steps by several means, and the communication of small gradients."""
    from ..bench.training import communication

    rows, notes = [], []
    if have:
        from ..bench.training_torch import training, width_for

        for size in sizes:
            more, stats = training(comm, iterations, width_for(size))
            rows += more
            notes.append(f"{more[0].work}: {describe(stats)}")
    if comm.size > 1:
        rows += communication(comm, iterations)
    return rows, notes


def measure_overlap(comm: Any, iterations: int, have: bool) -> tuple[list[Any], list[str]]:
    """Measure steps with and without overlap."""
    from ..bench.overlapping import overlaps, waiting

    if comm.size == 1:
        raise InvalidArgument("bench ddp --overlap: allowed on 2 ranks and more: mpidist run -n 2")
    rows = overlaps(comm, iterations, "backward that waits on a timer", waiting)
    if have:
        from ..bench.training_torch import busy, threads

        with threads(comm):
            rows += overlaps(comm, iterations, "backward that computes", busy)
    autos = [row.share for row in rows if row.name.startswith("auto")]
    return rows, [f"auto: at most {max(autos):.2f} of the time without overlap"]


def given(name: str) -> bool:
    """Tell whether an option stands in the command."""
    source = click.get_current_context().get_parameter_source(name)
    return source == ParameterSource.COMMANDLINE


def millions(text: str) -> list[float]:
    """Read numbers of parameters.

    Raises
    ------
    InvalidArgument
        If one is none, or not positive.
    """
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < 1e6 for size in sizes):
        raise InvalidArgument(f"--parameters {text}: allowed are millions, for example 4,17,50")
    return sizes


def check_options(overlap: bool) -> None:
    """Raise InvalidArgument where an option is given that would have no effect."""
    check_only(NAME, OPTIONS, ALLOWED)
    if overlap and given("parameters"):
        raise InvalidArgument("--overlap together with --parameters: its networks are fixed")


def check_not_for_collectives() -> None:
    """Raise InvalidArgument where an option of this benchmark is given to another one."""
    wrong = [f"--{name}" for name in ("parameters", "overlap") if given(name)]
    if wrong:
        raise InvalidArgument(f"{', '.join(wrong)}: allowed with bench {NAME} only")


def describe(stats: Any) -> str:
    """Say which way of overlapping was taken, after what trials, and where the time went."""
    parts = ("compute", "exposed", "hidden")
    times = ", ".join(f"{part} {1e3 * getattr(stats, part):.2f} ms" for part in parts)
    trials = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in stats.trials.items())
    tried = f" after steps of {trials}" if trials else ""
    return f"overlap {stats.overlap!r}{tried}; {times}"


def print_rows(rows: list[Any]) -> None:
    """Print the table of steps."""
    console = make_console()
    table = make_table(console, "what", "by", ">ms", ">time of ours / this")
    for row in rows:
        table.add_row(row.work, row.name, f"{1e3 * row.seconds:.3f}", f"{row.ratio:.2f}")
    show(console, table)


def print_overlap(rows: list[Any]) -> None:
    """Print the table of ways to overlap."""
    console = make_console()
    table = make_table(console, "step", "overlap", ">ms", ">least ms", ">time / none", ">hidden %")
    for row in rows:
        hidden = "" if row.hidden is None else f"{100 * row.hidden:.0f}"
        times = [f"{1e3 * seconds:.2f}" for seconds in (row.seconds, row.least)]
        table.add_row(row.work, row.name, *times, f"{row.share:.2f}", hidden)
    show(console, table)
