"""``mpidist show``: an algorithm or a pipeline schedule as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from ..errors import InvalidArgument, InvalidRank, UnknownName
from ..measure import counted
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import algorithms, find
from .console import examples, make_console
from .options import (
    COSTS,
    OUTPUT,
    Count,
    check_only,
    complete,
    groups_of,
    integer_ranges,
    load_option,
    named_algorithm,
    naming,
    only,
    picture,
    pipeline_schedule,
)

if TYPE_CHECKING:
    from ..pipeline.schedules.show import Picture
    from ..pipeline.schedules.simulate import Costs
    from ..pipeline.schedules.trace import Trace

STYLES = {
    "F": "white on blue",
    "B": "white on green",
    "I": "black on cyan",
    "W": "black on yellow",
    "title": "bold",
}
ALGORITHMS, PIPELINES = "algorithms of collectives", "pipeline schedules"  # uses of options
RANKS, STAGES, MICROBATCHES = 5, 4, 8  # by default
_READABLE = 200  # columns of a text picture in a file


def _complete(
    context: click.Context, argument: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return a shell's completions: collectives and schedules, or algorithms after a collective."""
    from ..pipeline.schedules.schedule import schedules

    given = context.params.get("what") or ()
    if given:
        names = (
            [a.name for a in algorithms(given[0], one_sided=True)]
            if given[0] in COLLECTIVES
            else []
        )
    else:
        names = [*COLLECTIVES, *(schedule.name for schedule in schedules())]
    return complete(names, incomplete)


@click.command(
    "show",
    short_help="Draw an ALGORITHM of a COLLECTIVE, or a pipeline SCHEDULE.",
    epilog=examples(
        "mpidist show allreduce ring --ranks 5",
        "mpidist show broadcast tree:3 --ranks 9 --root 2 --svg tree.svg",
        "mpidist show allreduce hierarchical --ranks 6 --nodes 3,3",
        "mpidist show 1f1b --stages 4 --microbatches 8",
        "mpidist show zb-v --costs 1,1.2,0.8 --png zb-v.png",
        "mpidist show auto --stages 3 --costs 1:1:2,1,1",
        "mpidist show --trace run.json",
    ),
)
@click.argument(
    "what", nargs=-1, metavar="{COLLECTIVE ALGORITHM | SCHEDULE}", shell_complete=_complete
)
@click.option(
    "--ranks",
    "--stages",
    type=Count(),
    help=f"Number of ranks; by default {RANKS}, for pipelines (one stage on each) {STAGES}.",
)
@only(
    ALGORITHMS,
    click.option(
        "--root", type=int, metavar="RANK", help="Root of rooted collectives.  [default: 0]"
    ),
    click.option("--arity", type=int, metavar="K", help="Arity of a tree; the same as tree:K."),
    click.option(
        "--nodes",
        type=integer_ranges(1),
        help="Ranks on each node, such as 3,2; by default one node.",
    ),
    click.option(
        "--segments", type=Count(), default=1, show_default=True, help="Segments of each block."
    ),
)
@only(
    PIPELINES,
    click.option(
        "--microbatches",
        type=Count(),
        help=f"Pipelines: number of them; by default {MICROBATCHES}.",
    ),
    click.option("--chunks", type=Count(), help="Pipelines: chunks of the model on a rank."),
    click.option(
        "--costs",
        type=COSTS,
        help="Pipelines: times of F, I, W and a message; by default 1,1,1.  1:2:1,1,1 has one F "
        "for each virtual stage.  With --trace in seconds; by default the measured times.",
    ),
    click.option(
        "--trace",
        type=click.Path(),
        metavar="FILE",
        help="Pipelines: draw this measured run, and the predicted run.",
    ),
)
@click.option("--svg", type=OUTPUT, metavar="FILE", help="Write an SVG instead of text.")
@only(
    PIPELINES,
    click.option(
        "--png",
        type=picture("png"),
        metavar="FILE",
        help="Pipelines: write a PNG instead; needs matplotlib.",
    ),
)
@load_option
@click.pass_context
def show_command(
    context: click.Context,
    what: tuple[str, ...],
    ranks: int | None,
    root: int | None,
    arity: int | None,
    nodes: list[int] | None,
    segments: int,
    microbatches: int | None,
    chunks: int | None,
    costs: Costs | None,
    trace: str | None,
    svg: str | None,
    png: str | None,
) -> None:
    """Draw an ALGORITHM of a COLLECTIVE: which rank sends which blocks to which, round by round.

    Or draw a pipeline SCHEDULE: which rank computes which microbatch, and when.  A SCHEDULE is a
    name, or FILE.py:NAME (MODULE:NAME) for a generator of your own; `auto` is computed for the
    --costs.
    """
    if len(what) == 2:
        check_only(context, ALGORITHMS)
        if root is not None and what[0] in COLLECTIVES and not COLLECTIVES[what[0]].rooted:
            raise click.UsageError("--root: only for collectives with a root")
        _show_algorithm(*what, ranks or RANKS, root or 0, arity, nodes, segments, svg)
        return
    if len(what) > 2 or (not what and trace is None):
        raise click.UsageError("expected a COLLECTIVE and an ALGORITHM, or a pipeline SCHEDULE")
    check_only(context, PIPELINES)
    name = what[0] if what else None
    if trace is not None:
        from ..pipeline.schedules.show import comparison

        drawn = comparison(_read_trace(trace, name, ranks, microbatches, chunks), costs)
    else:
        assert name is not None
        drawn = _draw(name, ranks or STAGES, microbatches or MICROBATCHES, chunks, costs)
    _show_schedule(drawn, svg, png)


def _show_algorithm(
    collective: str,
    algorithm: str,
    ranks: int,
    root: int,
    arity: int | None,
    nodes: list[int] | None,
    segments: int,
    svg: str | None,
) -> None:
    """Print an algorithm's picture as text, or write it as an SVG file."""
    from ..schedule import show

    choice = named_algorithm(collective, algorithm)
    if not 0 <= root < ranks:
        raise InvalidRank(root, ranks, "--root")
    if arity is not None:
        with naming("--arity"):
            choice = find(collective, f"{choice.algorithm.name}:{arity}")
    groups = groups_of(nodes, ranks)
    draw = show.text if svg is None else show.svg
    picture = draw(collective, choice, ranks, root=root, groups=groups, segments=segments)
    if svg is None:
        _warn_if_wide(picture)
        click.echo(picture)
    else:
        Path(svg).write_text(picture, encoding="utf-8")
        click.echo(f"{collective} {choice.name} on {counted(ranks, 'rank')}: {svg}")


def _warn_if_wide(picture: str) -> None:
    """If a picture is too wide, print on standard error how to get one that fits."""
    console = make_console(stderr=True)
    room = console.width if console.is_terminal else _READABLE
    width = max(map(len, picture.splitlines()))
    if width > room:
        console.print(
            f"{width} columns wide: --svg FILE draws it for a browser; fewer ranks, such as "
            "--ranks 8, fit a terminal",
            style="yellow",
        )


def _draw(
    name: str, stages: int, microbatches: int, chunks: int | None, costs: Costs | None
) -> Picture:
    """Return the picture of the schedule `name`; "auto" is the best one computed for `costs`."""
    from ..pipeline.schedules.automatic import automatic
    from ..pipeline.schedules.schedule import schedules
    from ..pipeline.schedules.show import picture
    from ..pipeline.schedules.simulate import Costs

    if name != "auto":
        every = [*(schedule.name for schedule in schedules()), "auto", *COLLECTIVES]
        if ":" not in name and name not in every:
            raise click.UsageError(str(UnknownName("SCHEDULE or COLLECTIVE", name, every)))
        with naming("SCHEDULE"):
            schedule = pipeline_schedule(name)
        return picture(schedule, stages, microbatches, chunks, costs)
    made = automatic(stages, microbatches, costs or Costs(), chunks=chunks or 1)
    return picture(made, stages, microbatches, costs=costs)


def _read_trace(
    path: str, name: str | None, ranks: int | None, microbatches: int | None, chunks: int | None
) -> Trace:
    """Return the trace in a file; raise InvalidArgument if its run had other values than given."""
    from ..pipeline.schedules.trace import read

    trace = read(path)
    run = trace.measured
    for what, given, actual in (
        ("schedule", name, run.name),
        ("--stages", ranks, run.placement.ranks),
        ("--microbatches", microbatches, run.microbatches),
        ("--chunks", chunks, run.placement.chunks),
    ):
        if given is not None and given != actual:
            raise InvalidArgument(f"{what} {given}: the run of {path} had {actual}")
    return trace


def _show_schedule(drawn: Picture, svg: str | None, png: str | None) -> None:
    """Write the picture to the SVG and PNG files given; print it if none is."""
    if svg is not None:
        Path(svg).write_text(drawn.svg(), encoding="utf-8")
    if png is not None:
        from ..bench.report import save_pipeline

        save_pipeline(drawn.sheet(), png)
    for path in (svg, png):
        if path is not None:
            click.echo(f"{drawn.title}: {path}")
    if svg is None and png is None:
        _print_picture(drawn)


def _print_picture(drawn: Picture) -> None:
    """Print a picture; on a terminal in colours, and as wide as the terminal."""
    from rich.text import Text

    console = make_console()
    if not console.is_terminal:
        console.print(drawn.text(), markup=False)
        return
    for line in drawn.lines(console.width):
        parts = ((text, STYLES.get(kind, "")) for text, kind in line)
        console.print(Text.assemble(*parts), soft_wrap=False)
