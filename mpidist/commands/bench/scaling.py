"""``mpidist bench scaling``: collectives over 1, 2, 4, … nodes."""

from __future__ import annotations

from typing import Any

import click

from ...schedule.contract import COLLECTIVES
from ..console import examples, progress_bar
from ..options import collective_name, load_option
from .collectives import (
    files_options,
    on_step,
    plot_option,
    report_results,
    settings_options,
    watched,
)


@click.command(
    "scaling",
    short_help="Measure collectives over 1, 2, 4, … nodes, in one run.",
    epilog=examples(
        "mpidist run mpidist bench scaling --json scaling.json --plot scaling.svg",
        "mpidist run mpidist bench scaling allreduce --algorithms auto,native,hierarchical",
    ),
)
@click.argument("collectives", nargs=-1, type=collective_name(), metavar="[COLLECTIVE]...")
@settings_options("auto", memory="private")
@files_options
@plot_option
@load_option
def scaling_command(
    collectives: tuple[str, ...],
    json_file: str | None,
    csv_file: str | None,
    plot: str | None,
    **settings: Any,
) -> int:
    """Measure each COLLECTIVE (by default all) over 1, 2, 4, … and all nodes, in one run.

    The exit code is 1 if any result was wrong.
    """
    import mpidist

    from ...bench import Settings
    from ...bench.report import draw_scaling, save
    from ...bench.runner import measure_scaling, scaling_steps

    settings["algorithms"] = settings["algorithms"] or ("auto",)
    comm, wanted = mpidist.init(), Settings(**settings)
    machine = watched(comm)
    names = collectives or tuple(COLLECTIVES)
    with progress_bar("measuring", scaling_steps(comm, names, wanted)) as advance:
        results = measure_scaling(comm, names, wanted, on_step(advance))
    machine.end(results)
    correct = all(comm.allgather_object(results.correct))
    if comm.rank == 0:
        report_results(results, json_file, csv_file)
        if plot:
            save(draw_scaling(results), plot)
    return 0 if correct else 1
