"""``mpidist calibrate``: measure the cost model's curves, into a file by which "auto" chooses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from ..errors import InvalidArgument
from ..measure import counted, format_size, significant
from ..tables import Column
from .bench.benchmark import watched
from .console import examples, make_console, make_table, show
from .options import DURATION, OUTPUT, load_option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..schedule.model import Curve
    from ..selection.calibration import Calibration


@click.command(
    "calibrate",
    short_help='Measure what the cost model needs, for "auto".',
    epilog=examples(
        "mpidist run -n 2 -- mpidist calibrate -o machine.json",
        "MPIDIST_TUNING=machine.json mpidist run -n 2 train.py",
        "mpidist run -n 2 -- mpidist explain allreduce 64K --tuning machine.json",
    ),
)
@click.option(
    "-o",
    "--output",
    type=OUTPUT,
    metavar="FILE",
    help="Write the figures; the entries of a tuning table in the file are kept.",
)
@click.option(
    "--budget", type=DURATION, default="6s", show_default=True, help="About how long to measure."
)
@click.option("--force", is_flag=True, help="Write the file of a busy machine nevertheless.")
@load_option
def calibrate_command(output: str | None, budget: float, force: bool) -> None:
    """Measure messages, the MPI library's collectives and the kernels in shared memory.

    From these curves the cost model predicts the time of every candidate; "auto" with such a file
    takes the fastest.  It takes seconds, where `mpidist tune`, which measures every candidate,
    takes a minute.  A core for each rank is needed.  On several nodes messages inside a node and
    between nodes are measured apart.  On a busy machine no file is written, with exit code 2,
    unless --force is given.
    """
    import mpidist

    from ..bench.tuner import existing_table
    from ..communicator.full_calibration import calibrate_fully, why_not
    from ..selection.tuning import TuningTable
    from .tune import refusal

    comm = mpidist.init()
    reason = why_not(comm)
    if reason is not None:
        raise InvalidArgument(f"calibrate: {reason}")
    old = None if output is None else existing_table(comm, output)
    machine = watched(comm)
    if machine.busy and output is not None and not force:
        raise refusal("calibrate", machine, f"{output} is not written")
    found = calibrate_fully(comm, budget)
    doubts = machine.again()
    if machine.busy and output is not None and not force:
        raise refusal("calibrate", machine, f"{output} is not written")
    if output is not None and comm.rank == 0:
        new = TuningTable(calibrations=[found])
        (new if old is None else old.merged(new)).save(output)
    console = make_console()
    show(console, _curves(console, found))
    if found.mapped is not None:
        show(console, _memories(console, found))
    call, further = found.messages.call, found.messages.further.at(0)
    console.print(
        f"{found.library}, {counted(comm.size, 'rank')}: {1e6 * call:.3g} µs for a call beside its "
        f"rounds, {1e6 * further:.3g} µs for each further message; noise "
        f"{100 * found.noise:.0f} %; {counted(len(found.kernels), 'curve')} of calls that no "
        f"schedule of messages serves{'' if output is None else f'; written to {output}'}"
    )
    if doubts:
        console.print(f"not to be trusted: {'; '.join(doubts)}", style="bold red", markup=False)


def _curves(console: Console, found: Calibration) -> Table:
    """Return the table of the curves of messages in microseconds, at their sizes."""
    known = found.messages
    curves: dict[str, Curve] = {
        "one way": known.one_way,
        "both ways": known.both_ways,
        "one way\nwritten": known.one_way_written,
        "both ways\nwritten": known.both_ways_written,
        "combine": known.combine,
        "combine\napart": known.combine_apart,
        "copy": known.copy,
    }
    return _table(console, known.one_way.sizes, curves)


def _memories(console: Console, found: Calibration) -> Table:
    """Return the table of the curves of memory that the ranks share, as that of messages."""
    curves: dict[str, Curve] = {}
    assert found.mapped is not None
    for name, known in (
        ("symmetric", found.mapped),
        ("slots", found.slots),
        ("published", found.published),
    ):
        if known is not None:
            curves[f"{name}\nread"], curves[f"{name}\ncombine"] = known.read, known.fold
            if name != "published":
                curves[f"{name}\nstore"] = known.store
    return _table(console, found.mapped.read.sizes, curves)


def _table(console: Console, sizes: Iterable[int], curves: dict[str, Curve]) -> Table:
    """Return a line for each size, and a column for each curve."""
    table = make_table(console, "bytes", *map(Column.numbers, (f"{n}\nµs" for n in curves)))
    for nbytes in sizes:
        times = [significant(1e6 * curve.at(nbytes), 3) for curve in curves.values()]
        table.add_row(format_size(nbytes), *times)
    return table
