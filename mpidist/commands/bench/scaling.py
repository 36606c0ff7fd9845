"""``mpidist bench scaling``: collectives over 1, 2, 4, … nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ...schedule.contract import COLLECTIVES
from ..console import examples
from ..options import collective_name, load_option
from .benchmark import benchmark, on_step, plot_option
from .collectives import settings_options

if TYPE_CHECKING:
    from ...bench import Results
    from ...communicator.communicator import Communicator


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
@benchmark
@plot_option
@load_option
def scaling_command(
    collectives: tuple[str, ...],
    **settings: Any,
) -> Callable[[Communicator], Results]:
    """Measure each COLLECTIVE (by default all) over 1, 2, 4, … and all nodes, in one run.

    The exit code is 1 if any result was wrong.
    """
    from ...bench import Settings
    from ...bench.runner import measure_scaling, scaling_steps

    wanted = Settings(**{**settings, "algorithms": settings["algorithms"] or ("auto",)})
    names = collectives or tuple(COLLECTIVES)

    def measure(comm: Communicator) -> Results:
        step = on_step(scaling_steps(comm, names, wanted))
        return measure_scaling(comm, names, wanted, step)

    return measure
