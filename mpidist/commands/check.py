"""``mpidist check``: where N ranks first compute something else than one process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from .console import examples
from .options import Count, Seconds

if TYPE_CHECKING:
    from ..oracle.check import Report
    from ..oracle.compare import Difference, Row


@click.command(
    "check",
    short_help="Compare a training on N ranks with one process.",
    epilog=examples(
        "mpidist check -n 4 train.py",
        "mpidist check -n 2 train.py --steps 5 -- --model small --epochs 1",
    ),
)
@click.option("-n", "-np", "--ranks", type=Count(), default=2, show_default=True)
@click.option(
    "--steps",
    type=Count(),
    default=3,
    show_default=True,
    help="Number of steps of an optimizer to compare.",
)
@click.option(
    "--timeout",
    type=Seconds(positive=True),
    default=600.0,
    show_default=True,
    help="Seconds after which a run of the script is ended.",
)
@click.argument("script", type=click.Path(dir_okay=False))
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]")
def check_command(
    script: str, arguments: tuple[str, ...], ranks: int, steps: int, timeout: float
) -> int:
    """Run a training SCRIPT on N ranks and as one process; name the first tensor that differs.

    The script is run on N ranks; then as one process that has the samples of all ranks, twice, and
    a third time with inputs and parameters changed by one unit in the last place: the distance of
    that run is the noise of each tensor.  For each step the table says of the batch, the outputs of
    all modules, gradients, parameters, the optimizer's state and buffers whether they are equal but
    for noise.  The first tensor that differs is named, with the ranks and the likely cause.  A
    pipeline is compared with its model as one stage that has all microbatches.  Arguments of the
    script stand behind --.

    The exit code is 0 if all is equal, 1 if something differs or the script fails on N ranks.
    """
    from ..launcher.allocation import SlurmAllocation
    from ..launcher.job import check_not_nested
    from ..oracle.check import ScriptFailed, check

    check_not_nested(os.environ)
    allocation = SlurmAllocation.find()
    try:
        report = check(
            script,
            arguments,
            ranks,
            steps,
            timeout=timeout,
            # The nodes of an allocation are assumed to share the current folder.
            folder=None if allocation is None or allocation.nodes == 1 else os.getcwd(),
            say=lambda text: click.echo(f"run: {text}", err=True),
        )
    except ScriptFailed as error:
        click.echo(error.output, err=True)
        raise
    for line in lines(report, ranks):
        click.echo(line)
    return 0 if report.equal else 1


def lines(report: Report, ranks: int) -> list[str]:
    """Return a report as lines of text."""
    found = [line for row in report.rows for line in _row(row, ranks)]
    if report.cause:
        found.append(f"        likely        {report.cause}")
    elif report.first is not None:
        found.append("        likely        no rule knows a cause")
    found += [f"note: {note}" for note in report.notes]
    if report.failure:
        found += [f"the script failed on {ranks} ranks:", report.failure]
    return found


def _row(row: Row, ranks: int) -> list[str]:
    from ..oracle.compare import FACTOR

    head = f"step {row.step:<3} {row.phase:13} "
    if not row.differences:
        if row.phase == "start":
            detail = row.note or f"{row.compared} tensors, the same bits on all ranks"
        elif row.phase == "batch":
            detail = row.note
        else:
            worst = f", worst {row.worst:.1f} of {FACTOR:.0f} × noise ({row.at})" if row.at else ""
            worst = ", the same bits as one process" if row.exact else worst
            detail = f"{row.compared} of {row.compared} tensors{worst}"
        return [f"{head}equal    {detail}"]
    first, count = row.differences[0], len(row.differences)
    of = f"; {count} of {max(row.compared, count)} tensors differ" if row.phase != "batch" else ""
    return [f"{head}DIFFERS  {_difference(row, first, ranks)}{of}"]


def _difference(row: Row, found: Difference, ranks: int) -> str:
    every = len(found.ranks) == ranks
    which = f"rank {', '.join(map(str, found.ranks))}" if not every else "all ranks"
    if row.phase == "batch":
        return f"{row.note}; {which}"
    if found.missing:
        return f"first: {found.name}, missing on rank {', '.join(map(str, found.missing))}"
    if found.extra:
        return f"first: {found.name}, {which}, which the reference does not have"
    size = "other bits, " if found.exact else ""
    size += f"distance {found.distance:.1e}"
    if found.norm:
        size += f" of a norm of {found.norm:.1e}"
    noise = f", noise {found.noise:.0e}" if found.noise else ""
    return f"first: {found.name}, {which}, {size}{noise}"
