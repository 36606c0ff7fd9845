"""``mpidist bench collectives``: every algorithm beside the bare mpi4py call."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import click

from ...schedule.contract import COLLECTIVES
from ..console import examples
from ..options import (
    CALLED,
    DTYPE,
    SIZES,
    Count,
    Seconds,
    algorithm_names,
    collective_name,
    load_option,
)
from .benchmark import benchmark, on_step, plot_option, report_option

if TYPE_CHECKING:
    from ...bench import Results
    from ...communicator.communicator import Communicator


sizes_option = click.option(
    "--bytes",
    "sizes",
    type=SIZES,
    default="8,64K,1M",
    show_default=True,
    help="Sizes of the whole buffer; 8-64M is 8, 32, 128, … 64M.",
)
dtype_option = click.option(
    "--dtype", type=DTYPE, default="float32", show_default=True, help="Dtype of the elements."
)
_SETTINGS = (
    dtype_option,
    click.option(
        "--op", default="sum", metavar="NAME", show_default=True, help="Operation of reductions."
    ),
    click.option(
        "--root", default=0, metavar="RANK", show_default=True, help="Root of rooted collectives."
    ),
    click.option("--in-place", is_flag=True, help="Write the result over the input."),
    click.option(
        "--iterations",
        type=Count(),
        default=200,
        show_default=True,
        help="Maximum number of timed iterations for each collective and size.",
    ),
    click.option(
        "--budget",
        type=Seconds(),
        default=2.0,
        show_default=True,
        help="Time for each collective and size.",
    ),
    click.option(
        "--limit",
        type=Seconds(),
        default=30.0,
        show_default=True,
        help="Time after which a measurement is cut short.",
    ),
)


def settings_options(default: str, memory: str) -> Callable[[Callable], Callable]:
    """Return a decorator that adds the options of :class:`~mpidist.bench.Settings`.

    `default` names, for the help, the algorithms that are measured by default; `memory` is the
    default of ``--memory``.
    """
    named = click.option(
        "--algorithms",
        type=algorithm_names(COLLECTIVES, *CALLED, one_sided=True),
        help=f"Algorithms to measure; by default {default}.",
    )
    places = click.option(
        "--memory",
        type=click.Choice(["auto", "private", "symmetric", "both"]),
        default=memory,
        show_default=True,
        help="Memory of the arrays: all private, all symmetric (of comm.empty), each candidate in "
        "both, or only auto in both (auto).  Those of the bare mpi4py call are always private.",
    )
    options = (sizes_option, named, places, *_SETTINGS)
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


@click.command(
    "collectives",
    short_help="Measure every algorithm beside the bare mpi4py call.",
    epilog=examples(
        "mpidist run -n 4 -- mpidist bench allreduce --bytes 8,64K,1M,64M",
        "mpidist run -n 2 -- mpidist bench allgather alltoall --algorithms native,ring,pairwise",
        "mpidist run -n 4 -- mpidist bench allreduce --bytes 8-64M --plot a.png --json a.json",
        "mpidist run -n 4 -- mpidist bench allreduce --import mine.py --algorithms ring,mine",
        "mpidist run -n 2 -- mpidist bench allreduce --bytes 64K-64M --algorithms auto --in-place",
    ),
)
@click.argument(
    "collectives", nargs=-1, required=True, type=collective_name(), metavar="COLLECTIVE..."
)
@settings_options("native, auto, all executors and algorithms", memory="auto")
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Measure the memory bandwidth too; by default with --memory symmetric and both.",
)
@benchmark
@plot_option
@report_option
@load_option
def collectives_command(
    collectives: tuple[str, ...],
    stream: bool | None,
    **settings: Any,
) -> Callable[[Communicator], Results]:
    """Measure every algorithm of each COLLECTIVE beside the bare mpi4py call, in one run.

    The data change in every iteration, and every result is checked.  A time is the median over
    the iterations of the slowest rank's time; "x mpi4py" is the time of the bare call divided by
    it: above 1 is faster.  "used" is the time of writing the input, the call and the first reading
    of the result, together.  The exit code is 1 if any result was wrong.
    """
    from ...bench import Settings, run_benchmark, steps

    wanted = Settings(**settings)
    step = on_step(steps(collectives, wanted))
    return lambda comm: run_benchmark(comm, collectives, wanted, step, stream)
