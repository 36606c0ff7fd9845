"""``mpidist bench overhead``: the time that mpidist itself adds to a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ..console import examples
from .benchmark import benchmark

if TYPE_CHECKING:
    from ...bench import Results
    from ...communicator.communicator import Communicator


@click.command(
    "overhead",
    short_help="Measure the time that mpidist itself adds to a call.",
    epilog=examples("mpidist run -n 2 -- mpidist bench overhead"),
)
@benchmark
def overhead_command() -> Callable[[Communicator], Results]:
    """Measure a round of the engine, the flight record, and native beside the bare mpi4py call."""
    from ...bench.overhead import measure_overhead

    return measure_overhead
