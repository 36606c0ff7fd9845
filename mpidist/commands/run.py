"""``mpidist run``: start a program on a number of ranks, in SLURM too."""

from __future__ import annotations

import shutil
from typing import Any

import click

from ..launcher.job import REQUEUES, ROLL_CALL, JobOptions, run_job
from ..launcher.slurm import LAUNCHERS
from ..launcher.supervisor import MPI_WITHIN
from .console import examples
from .options import OUTPUT, Count, Seconds


@click.command(
    "run",
    short_help="Start PROGRAM on a number of ranks.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "mpidist run -n 4 train.py --epochs 3",
        "mpidist run -n 4 -- mpidist bench allreduce",
        "mpidist run -n 2 -m my_package.train",
        "mpidist run -n 4 --dry-run train.py",
        "mpidist run train.py          one rank for each core, or for each task of an allocation",
        "mpidist run --log-dir logs --knobs slurm train.py",
    ),
)
@click.option(
    "-n",
    "-np",
    "--ranks",
    type=Count(),
    help="Number of ranks; by default one for each core, in an allocation one for each task.",
)
@click.option(
    "--ranks-per-node",
    type=Count(),
    help="In an allocation: maximum number of ranks on a node.",
)
@click.option(
    "--launcher",
    type=click.Choice(LAUNCHERS),
    default="auto",
    show_default=True,
    help="Launcher in an allocation; auto is srun if it can start this MPI, otherwise mpiexec.",
)
@click.option(
    "--mpi", metavar="PLUGIN", help="Plugin of srun; by default pmix or pmi2, as the MPI needs."
)
@click.option(
    "--knobs",
    type=click.Path(),
    metavar="PATH",
    help="Set the environment variables of this file, or of the file in this folder for the MPI in "
    "use, such as env.openmpi.",
)
@click.option("--label", is_flag=True, help="Begin each line of output with its rank.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Write one file for each rank; show rank 0's output only.",
)
@click.option(
    "--requeue", is_flag=True, help="Have SLURM requeue the job if it ends with exit code 75."
)
@click.option(
    "--requeue-limit",
    type=Count(),
    help=f"Maximum number of requeues, after which the job fails; by default {REQUEUES}.",
)
@click.option(
    "--watch/--no-watch",
    default=None,
    help="Monitor the ranks, to end the job when one fails; by default in an allocation and with "
    "MPICH.",
)
@click.option(
    "--start-timeout",
    type=Seconds(positive=True),
    help="End a monitored job if MPI_Init has not returned on all ranks this long after the last "
    f"rank entered it; by default {MPI_WITHIN:g}.",
)
@click.option(
    "--roll-call",
    type=Seconds(),
    default=ROLL_CALL,
    metavar="SECONDS",
    show_default=True,
    help="Print where each rank is when none has begun or ended an operation of mpidist for so "
    "long; 0 for never.",
)
@click.option(
    "--hang-kill",
    type=Seconds(positive=True),
    metavar="SECONDS",
    help="In place of --roll-call: after it kill a rank for which all others have waited so long. "
    "It is lost, see --spares, --survive and --max-restarts.  Less than the deadline "
    "(MPIDIST_TIMEOUT).",
)
@click.option(
    "--survive",
    is_flag=True,
    help="When a rank is lost, let the others go on: see comm.survivors(); Open MPI 5 or later.",
)
@click.option(
    "--spares",
    type=Count(),
    help="Start N more ranks, which wait to take the place of lost ones: see md.elastic; Open MPI "
    "5 or later.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="K",
    help="Start the job again after a failure, at most K times; md.elastic continues from memory, "
    "any other program from its Checkpoint.",
)
@click.option(
    "--min-ranks",
    type=Count(),
    help="With --max-restarts on several nodes: the least number of ranks on which the job starts "
    "again, without the nodes that are down; by default 1.",
)
@click.option(
    "--trace",
    type=OUTPUT,
    metavar="FILE",
    help="Write a trace of all ranks at the end of the job, for ui.perfetto.dev.",
)
@click.option(
    "--full-traceback",
    is_flag=True,
    help="When a rank fails, show the frames inside mpidist in its traceback, and the launcher's "
    "own report.",
)
@click.option("-q", "--quiet", is_flag=True, help="Do not print the command that is started.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the command with the environment variables it needs, do not start it.",
)
@click.argument("program", nargs=-1, required=True, type=click.Path(readable=False))
@click.pass_context
def run_command(
    context: click.Context, program: tuple[str, ...], dry_run: bool, quiet: bool, **options: Any
) -> int:
    """Start PROGRAM on a number of ranks, with the launcher that belongs to the installed mpi4py.

    In a SLURM allocation the launcher is srun, with the plugin that this MPI needs, or mpiexec. The
    command is printed first, as one would type it, with a comment of what is started in place of
    some words; --dry-run prints it with the environment variables that the launcher needs, to copy
    and change.  The exit code is 0 only if every rank succeeded, otherwise that of the first rank
    that failed.  A traceback that is equal on
    several ranks is printed once, and the last line names the rank that failed first.  When a rank
    was killed or crashed, the lines before say where each rank was: see mpidist flight.
    """
    root = context.find_root().command
    first = program[0]
    if (
        isinstance(root, click.Group)
        and root.get_command(context, first)
        and not shutil.which(first)
    ):
        raise click.UsageError(f"{first}: no such program; did you mean: mpidist {first}?")
    if quiet and dry_run:
        raise click.UsageError("--quiet: not with --dry-run, which only prints the command")

    def announce(command: str) -> None:
        if not quiet:
            click.echo(command, err=not dry_run)

    return run_job(program, JobOptions(**options), announce, dry_run)
