"""``mpidist bench gpu``: each executor of arrays on a GPU, and the copies that it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..console import examples
from ..options import Count, collective_name
from .benchmark import benchmark
from .collectives import dtype_option, sizes_option

if TYPE_CHECKING:
    from ...bench import Results
    from ...communicator.communicator import Communicator


@click.command(
    "gpu",
    short_help="Measure each executor of arrays on a GPU beside bare copies.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench gpu allreduce --bytes 64K-64M --json gpu.json"
    ),
)
@click.argument("collectives", nargs=-1, type=collective_name(), metavar="[COLLECTIVE]...")
@sizes_option
@dtype_option
@click.option(
    "--iterations",
    type=Count(),
    default=200,
    show_default=True,
    help="Timed iterations.",
)
@benchmark
def gpu_command(
    collectives: tuple[str, ...],
    sizes: list[int],
    dtype: Any,
    iterations: int,
) -> Callable[[Communicator], Results]:
    """Measure collectives of arrays on a GPU by each available executor, and the copies alone.

    COLLECTIVE is allreduce, reduce_scatter, allgather or broadcast; by default all four.  The
    exit code is 1 if any result was wrong.
    """
    from ...bench.gpu import measure_gpu

    return lambda comm: measure_gpu(comm, collectives, sizes, dtype, iterations)
