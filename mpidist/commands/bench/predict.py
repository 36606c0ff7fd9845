"""``mpidist bench predict``: predicted times beside measured ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ...schedule.contract import COLLECTIVES
from ..console import examples
from ..options import SIZES, Seconds, collective_name
from .benchmark import benchmark

if TYPE_CHECKING:
    from ...bench import Results
    from ...communicator.communicator import Communicator

_ALL = [name for name, contract in COLLECTIVES.items() if not contract.idempotent]


@click.command(
    "predict",
    short_help="Compare the cost model's predictions with measured times.",
    epilog=examples(
        "mpidist run -n 2 -- mpidist bench predict",
        "mpidist run -n 2 -- mpidist bench predict allreduce --bytes 8-4M --json p.json",
    ),
)
@click.argument("collectives", nargs=-1, type=collective_name(), metavar="[COLLECTIVE]...")
@click.option(
    "--bytes",
    "sizes",
    type=SIZES,
    default="8,1K,8K,64K,512K,2M",
    show_default=True,
    help="Sizes of the whole buffer; 8-64M is 8, 32, 128, … 64M.",
)
@click.option(
    "--budget", type=Seconds(), default=20.0, show_default=True, help="Time for the measured calls."
)
@benchmark
def predict_command(
    collectives: tuple[str, ...], sizes: list[int], budget: float
) -> Callable[[Communicator], Results]:
    """Calibrate the cost model, predict calls of each COLLECTIVE by every algorithm, measure them.

    By default all collectives with data.  The calibration measures messages by probes of its own,
    and the library's collectives and the kernels in shared memory at six sizes.  The notes are the
    median errors, and how much the probes scattered: above 15 % the errors are the machine's.
    """
    from ...bench.predict import predict

    return lambda comm: predict(comm, collectives or _ALL, sizes, budget)
