"""``mpidist bench pipeline``: steps of a pipeline, and the cost of its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..console import examples, make_console, make_table, show
from ..options import POSITIVE
from .collectives import json_option
from .ddp import MISSING, print_rows

if TYPE_CHECKING:
    from ...bench.pipelines import EngineCost
    from ...bench.training import Row


@click.command(
    "pipeline",
    short_help="Steps of a pipeline beside PyTorch's, and its overhead.",
    epilog=examples("mpidist run -n 2 -- mpidist bench pipeline"),
)
@click.option(
    "--iterations",
    type=POSITIVE,
    metavar="N",
    default=40,
    show_default=True,
    help="Timed steps of each kind.",
)
@json_option
def pipeline_command(iterations: int, json_file: str | None) -> int:
    """Measure the overhead of the pipeline's engine, and steps beside torch.distributed.pipelining.

    On 4 ranks the averaging of replicas is measured too.  It needs 2 or more ranks.
    """
    import mpidist

    from ...bench.pipelines import measure_pipelines
    from ...bench.results import write_json

    comm = mpidist.init()
    found = measure_pipelines(comm, iterations)
    if comm.rank == 0:
        _print_costs(found.engine, comm.size)
        if found.rows:
            print_rows(found.rows)
            _print_shares(found.rows)
        if not found.has_torch:
            make_console().print(MISSING)
        if json_file:
            write_json(json_file, found.as_json())
    return 0


def _print_costs(costs: list[EngineCost], ranks: int) -> None:
    """Print the time of the engine; on 2 ranks with the goal beside it."""
    from ...bench.pipelines import ENGINE_GOAL

    console = make_console()
    heads = ["identity stages", ">microbatches", ">µs a microbatch and stage"]
    table = make_table(console, *heads, *([">goal"] if ranks == 2 else []))
    for cost in costs:
        mark = "" if cost.seconds <= ENGINE_GOAL else "missed: "
        goal = [f"{mark}≤ {1e6 * ENGINE_GOAL:.0f}"] if ranks == 2 else []
        table.add_row(cost.schedule, str(cost.microbatches), f"{1e6 * cost.seconds:.1f}", *goal)
    show(console, table)


def _print_shares(rows: list[Row]) -> None:
    """Print at how many sizes the goal against PyTorch's own pipelining was reached."""
    from ...bench.pipelines import SHARE_GOAL, THEIRS

    shares = [row.ratio for row in rows if row.name == THEIRS]
    if shares:
        reached = sum(share <= SHARE_GOAL for share in shares)
        make_console().print(
            f"goal ≤ {SHARE_GOAL:g} of {THEIRS}: reached at {reached} of {len(shares)} sizes, "
            f"worst {max(shares):.2f}"
        )
