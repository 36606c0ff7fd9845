"""``mpidist list`` and ``mpidist show``: the algorithms there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from ..errors import InvalidArgument, InvalidRank
from ..pipeline.schedules.automatic import automatic
from ..pipeline.schedules.schedule import PipelineSchedule, schedules
from ..pipeline.schedules.simulate import Costs
from ..schedule.contract import COLLECTIVES
from ..schedule.registry import Algorithm, Groups, algorithms, find
from .console import examples, make_console, make_table
from .console import show as print_table
from .options import Numbers, check_writable, find_pipeline, load_option, only_for

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


def tabulate_schedules(console: Any) -> Any:
    """Tabulate the registered schedules."""
    table = make_table(console, "=pipeline", "=chunks", "=splits B", "summary")
    for row in map(describe_schedule, schedules()):
        chunks = f"{row['chunks']}{' or any' if row['any_chunks'] else ''}"
        splits = {True: "yes", False: "no", None: "?"}[row["splits"]]
        table.add_row(row["schedule"], chunks, splits, row["summary"])
    return table


def describe_schedule(schedule: PipelineSchedule) -> dict[str, Any]:
    """Give what is known of a schedule, as JSON has it."""
    return {
        "schedule": schedule.name,
        "chunks": schedule.chunks,
        "any_chunks": schedule.any_chunks,
        "placement": schedule.placement,
        "splits": schedule.splits,
        "summary": schedule.summary,
    }


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
        from ..bench.plots import check_matplotlib

        check_matplotlib("--png")
        if Path(png).suffix.lower() != ".png":
            raise InvalidArgument(f"--png {png}: its name must end in .png")
    if trace is not None:
        from ..pipeline.schedules.show import comparison

        drawn = comparison(read_trace(trace, name, stages, microbatches, chunks), costs)
    else:
        assert name is not None
        drawn = draw(name, stages, microbatches, chunks, costs)
    if svg is not None:
        Path(svg).write_text(drawn.svg(), encoding="utf-8")
    if png is not None:
        from ..bench.plots import save_pipeline as save

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
    from ..pipeline.schedules.show import picture

    stages = 4 if stages is None else stages
    microbatches = 8 if microbatches is None else microbatches
    for option, number in (("--stages", stages), ("--microbatches", microbatches)):
        if number < 1:
            raise InvalidArgument(f"{option} {number}: allowed are whole numbers >= 1")
    if name != "auto":
        return picture(find_pipeline(name), stages, microbatches, chunks, costs)
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
    from ..pipeline.schedules.trace import read

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


_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
_UNEVEN = ((0, 1, 2), (3, 4))


@click.command(
    "list",
    short_help="List the algorithms of collectives and the schedules of pipelines.",
    epilog=examples(
        "mpidist list",
        "mpidist list allreduce --json",
        "mpidist list pipeline",
        "mpidist list --import my_algorithms.py",
    ),
)
@click.argument("collective", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@load_option
def list_command(collective: str | None, as_json: bool, imports: Any) -> None:
    """List the algorithms of one COLLECTIVE or of all; pipeline: the schedules of pipelines."""
    if collective == PIPELINE:
        list_schedules(as_json)
        return
    order = list(COLLECTIVES)
    found = sorted(algorithms(collective), key=lambda a: order.index(a.collective))
    rows = [describe(a) for a in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    console = make_console()
    print_table(console, tabulate(console, rows))
    if collective is None:
        print_table(console, tabulate_schedules(console))
    for line in (_COSTS if console.width >= _WIDE else _NO_COSTS, *_LEGEND):
        console.print(line)


def list_schedules(as_json: bool) -> None:
    """List the schedules of pipelines."""
    if as_json:
        click.echo(json.dumps([describe_schedule(schedule) for schedule in schedules()], indent=2))
        return
    console = make_console()
    print_table(console, tabulate_schedules(console))


PIPELINE = "pipeline"
_WIDE = 120  # columns from which there is room for the costs
_COSTS = "n bytes in the whole buffer, p ranks, m nodes, g ranks on a node; lg is to the base 2."
_NO_COSTS = f"Rounds and bytes of each: in a terminal of {_WIDE} columns, in a file, or by --json."
_LEGEND = (
    "Ordered: combines in rank order, and so serves operations that do not commute.",
    "tree:K is a tree of arity K, for example tree:4.",
    "hierarchical/LOCAL/ACROSS, and hierarchical_leaders: played in two levels, by the algorithm "
    "LOCAL inside the nodes and ACROSS between them, for example hierarchical/direct/ring.",
    "Ways without a schedule that a call may ask for as well: native, MPI's own collective; "
    "on one node symmetric, in arrays of comm.empty(); staged, through shared memory; and "
    "single_copy, out of the memory of the other processes.",
)


def tabulate(console: Any, rows: list[dict[str, Any]]) -> Any:
    """Tabulate algorithms; in a narrow terminal without their costs."""
    wide = console.width >= _WIDE
    costs_of = ("rounds", "bytes per rank") if wide else ()
    table = make_table(console, "=collective", "=algorithm", *costs_of, "ordered", "summary")
    before = ""
    for row in rows:
        first = "" if row["collective"] == before and console.is_terminal else row["collective"]
        before = row["collective"]
        notes = f" ({row['requires']})" if row["requires"] else ""
        table.add_row(
            first,
            row["algorithm"] + (":K" if "arity" in row["uses"] else ""),
            *((row["rounds"], row["bytes_per_rank"]) if wide else ()),
            "yes" if row["ordered"] else "no",
            row["summary"] + notes,
        )
    return table


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """Give what is known of an algorithm, as JSON has it."""
    rounds, moved = costs(algorithm.doc)
    return {
        "collective": algorithm.collective,
        "algorithm": algorithm.name,
        "rounds": rounds,
        "bytes_per_rank": moved,
        "ordered": algorithm.ordered,
        "equal_blocks": algorithm.equal_blocks,
        "requires": requirement(algorithm),
        "uses": sorted(algorithm.uses),
        "summary": algorithm.summary,
    }


def costs(doc: str) -> tuple[str, str]:
    """Read ``Rounds: … Bytes per rank: ….`` of a docstring; empty strings where it is not there."""
    found = re.search(r"Rounds:\s*(.*?)\.\s+Bytes per rank:\s*(.*?)\.(?:\n|$)", doc, re.DOTALL)
    if not found:
        return "", ""
    return " ".join(found[1].split()), " ".join(found[2].split())


def requirement(algorithm: Algorithm) -> str | None:
    """Give what an algorithm says of the first size, or uneven nodes, that it cannot serve."""
    for size in _SIZES:
        reason = algorithm.unsupported(size)
        if reason:
            return f"{size} ranks: {reason}"
    reason = algorithm.unsupported(5, groups=_UNEVEN)
    return f"nodes of 3 and 2 ranks: {reason}" if reason else None


COLLECTIVE_OPTIONS = ("ranks", "root", "arity", "nodes", "segments")


@click.command(
    "show",
    short_help="Draw what an ALGORITHM or a pipeline SCHEDULE does, and when.",
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
@click.argument("what", nargs=-1, metavar="{COLLECTIVE ALGORITHM | SCHEDULE}")
@click.option("--ranks", default=5, show_default=True, help="Number of ranks.")
@click.option("--root", default=0, show_default=True, help="Root, where the collective has one.")
@click.option("--arity", type=int, help="Children of a rank in a tree; the same as tree:K.")
@click.option(
    "--nodes", type=Numbers(), help="Ranks on each node, for example 3,2; by default one."
)
@click.option("--segments", default=1, show_default=True, help="Pieces each block is cut into.")
@click.option("--stages", type=int, help="Pipelines: number of ranks; by default 4.")
@click.option("--microbatches", type=int, help="Pipelines: by default 8.")
@click.option("--chunks", type=int, help="Pipelines: parts of the model that a rank holds.")
@click.option(
    "--costs",
    type=TimesOfActions(),
    help="Pipelines: times, by default 1,1,1; for each virtual stage as 1:2:1,1,1; with --trace "
    "in seconds, by default those that it measured.",
)
@click.option(
    "--trace", metavar="FILE", help="Pipelines: a measured run, under what its order predicts."
)
@click.option("--svg", type=click.Path(), metavar="FILE", help="Write a picture instead of text.")
@click.option(
    "--png", type=click.Path(), metavar="FILE", help="Pipelines: the same, by matplotlib."
)
@load_option
@click.pass_context
def show_command(
    context: click.Context,
    what: tuple[str, ...],
    ranks: int,
    root: int,
    arity: int | None,
    nodes: list[int] | None,
    segments: int,
    svg: str | None,
    imports: Any,
    **pipeline: Any,
) -> None:
    """Draw what an ALGORITHM of a COLLECTIVE does: who sends which blocks to whom, round by round.

    Or what a pipeline SCHEDULE does: which rank computes which microbatch, and when.  A SCHEDULE is
    a name or MODULE:FUNCTION, a generator of your own; auto is computed for the --costs.
    """
    if len(what) == 2:
        only_for(context, "pipeline schedules, which have one name", *pipeline)
        show_algorithm(*what, ranks, root, arity, nodes, segments, svg)
    elif len(what) == 1 or (pipeline["trace"] is not None and not what):
        only_for(
            context, "algorithms of collectives", "ranks", "root", "arity", "nodes", "segments"
        )
        show_schedule(what[0] if what else None, svg=svg, **pipeline)
    else:
        raise click.UsageError("give a COLLECTIVE and an ALGORITHM, or a pipeline SCHEDULE")


def show_algorithm(
    collective: str,
    algorithm: str,
    ranks: int,
    root: int,
    arity: int | None,
    nodes: list[int] | None,
    segments: int,
    svg: str | None,
) -> None:
    """Draw an algorithm of a collective."""
    choice = find(collective, algorithm)
    for name, value in (("--ranks", ranks), ("--segments", segments)):
        if value < 1:
            raise InvalidArgument(f"{name} {value}: allowed are whole numbers >= 1")
    if not 0 <= root < ranks:
        raise InvalidRank(root, ranks, "--root ")
    if arity is not None:
        choice = find(collective, f"{choice.algorithm.name}:{arity}")
    groups = as_groups(nodes, ranks)
    check_writable("--svg", svg)
    from ..schedule import show

    draw = show.text if svg is None else show.svg
    picture = draw(collective, choice, ranks, root=root, groups=groups, segments=segments)
    if svg is None:
        click.echo(picture)
    else:
        Path(svg).write_text(picture, encoding="utf-8")
        click.echo(f"{collective} {choice.name} on {ranks} ranks: {svg}")


def as_groups(nodes: list[int] | None, ranks: int) -> Groups | None:
    """Give the ranks on each node, where each node has so many."""
    if nodes is None:
        return None
    if sum(nodes) != ranks or min(nodes) < 1:
        raise InvalidArgument(
            f"--nodes {','.join(map(str, nodes))}: allowed are numbers >= 1 whose sum is "
            f"--ranks {ranks}"
        )
    starts = [sum(nodes[:i]) for i in range(len(nodes))]
    return tuple(tuple(range(a, a + n)) for a, n in zip(starts, nodes))
