"""What ``mpidist list`` and ``mpidist show`` know of pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from ..errors import InvalidArgument
from ..pipeline.automatic import automatic
from ..pipeline.costs import Costs
from ..pipeline.schedule import PipelineSchedule, find_schedule, schedules
from ..schedule.contract import COLLECTIVES
from .common import make_console, make_table
from .options import check_writable, load_names

STYLES = {
    "F": "white on blue",
    "B": "white on green",
    "I": "black on cyan",
    "W": "black on yellow",
    "title": "bold",
}


class TimesOfActions(click.ParamType):
    """Times of F, I, W and of a message: ``1,1,1``, or ``1:2:1,1,1,0.1``."""

    name = "F,I,W[,message]"

    def convert(self, value: Any, param: Any, ctx: Any) -> Costs:
        """Give the costs."""
        if isinstance(value, Costs):
            return value
        try:
            times = [[float(t) for t in part.split(":")] for part in value.split(",")]
        except ValueError:
            times = []
        if len(times) not in (3, 4) or any(len(part) > 1 for part in times[3:]):
            raise InvalidArgument(
                f"--costs {value}: allowed are three numbers, or four with the time of a message; "
                "each of the first three may be one for each virtual stage, as 1:2:1"
            )
        return Costs(*(part[0] if len(part) == 1 else part for part in times))  # type: ignore


def tabulate(console: Any) -> Any:
    """Tabulate the registered schedules."""
    table = make_table(console, "=pipeline", "=chunks", "=splits B", "summary")
    for row in map(describe, schedules()):
        chunks = f"{row['chunks']}{' or any' if row['any_chunks'] else ''}"
        splits = {True: "yes", False: "no", None: "?"}[row["splits"]]
        table.add_row(row["schedule"], chunks, splits, row["summary"])
    return table


def describe(schedule: PipelineSchedule) -> dict[str, Any]:
    """Give what is known of a schedule, as JSON has it."""
    return {
        "schedule": schedule.name,
        "chunks": schedule.chunks,
        "any_chunks": schedule.any_chunks,
        "placement": schedule.placement,
        "splits": schedule.splits,
        "summary": schedule.summary,
    }


def find(name: str) -> PipelineSchedule | Callable:
    """Give a schedule by its name, or a generator function by ``MODULE:FUNCTION``."""
    module, colon, function = name.rpartition(":")
    if not colon:
        if name in COLLECTIVES:
            raise InvalidArgument(f"{name} is a collective: give one of its algorithms as well")
        return find_schedule(name)
    found = load_names(module, name).get(function)
    if not callable(found):
        raise InvalidArgument(f"{name}: {module} has no function {function}")
    return found


def show_schedule(
    name: str | None,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    costs: Costs | None,
    svg: str | None,
    png: str | None,
    trace: str | None,
) -> None:
    """Draw a schedule, or a measured run under what its order predicts."""
    for option, path in (("--svg", svg), ("--png", png)):
        check_writable(option, path)
    if png is not None:
        from ..bench.plot import check_matplotlib

        check_matplotlib("--png")
        if Path(png).suffix.lower() != ".png":
            raise InvalidArgument(f"--png {png}: its name must end in .png")
    if trace is not None:
        from ..pipeline.show import comparison

        drawn = comparison(read_trace(trace, name, stages, microbatches, chunks), costs)
    else:
        assert name is not None
        drawn = draw(name, stages, microbatches, chunks, costs)
    if svg is not None:
        Path(svg).write_text(drawn.svg(), encoding="utf-8")
    if png is not None:
        from ..bench.plot_pipeline import save

        save(drawn.sheet(), png)
    for path in (svg, png):
        if path is not None:
            click.echo(f"{drawn.title}: {path}")
    if svg is None and png is None:
        print_picture(drawn)


def draw(
    name: str,
    stages: int | None,
    microbatches: int | None,
    chunks: int | None,
    costs: Costs | None,
) -> Any:
    """Give the picture of a schedule; "auto" is computed for the costs."""
    from ..pipeline.show import picture

    stages = 4 if stages is None else stages
    microbatches = 8 if microbatches is None else microbatches
    for option, number in (("--stages", stages), ("--microbatches", microbatches)):
        if number < 1:
            raise InvalidArgument(f"{option} {number}: allowed are whole numbers >= 1")
    if name != "auto":
        return picture(find(name), stages, microbatches, chunks, costs)
    count = 1 if chunks is None else chunks
    made = automatic(stages, microbatches, costs or Costs(), chunks=count)
    return picture(made, stages, microbatches, costs=costs)


def print_picture(drawn: Any) -> None:
    """Print a picture: coloured, and as wide as the terminal, where there is one."""
    console = make_console()
    if not console.is_terminal:
        console.print(drawn.text(), markup=False)
        return
    for line in drawn.lines(console.width):
        parts = ((text, STYLES.get(kind, "")) for text, kind in line)
        console.print(Text.assemble(*parts), soft_wrap=False)


def read_trace(
    path: str, name: str | None, stages: int | None, microbatches: int | None, chunks: int | None
) -> Any:
    """Read a trace; what else was said of it on the command line must be so."""
    from ..pipeline.trace import read

    found = read(path)
    it = found.measured
    place = it.placement
    for what, said, is_so in (
        ("schedule", name, it.name),
        ("--stages", stages, place.ranks),
        ("--microbatches", microbatches, it.microbatches),
        ("--chunks", chunks, place.chunks),
    ):
        if said is not None and said != is_so:
            raise InvalidArgument(f"{what} {said}: the run of {path} had {is_so}")
    return found
