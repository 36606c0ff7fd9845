"""``mpidist run``: start the launcher that belongs to the installed mpi4py, in SLURM too."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

import click

from ..allocation import Allocation
from ..errors import InvalidArgument, LaunchError
from .common import TERMINAL, examples, launched_rank
from .launchers import library_vendor, read_knobs
from .slurm_line import LAUNCHERS, choose_launcher
from .starting import allocated, as_command, become, here, start_again
from .watch import Watch


@click.command(
    "run",
    short_help="Start PROGRAM on a number of ranks, with the flags that it needs.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "mpidist run -n 4 train.py --epochs 3",
        "mpidist run -n 4 -- mpidist bench allreduce",
        "mpidist run -n 2 -m my_package.train",
        "mpidist run -n 4 --dry-run train.py",
        "mpidist run train.py                     in an allocation: as many as it has tasks",
        "mpidist run --log-dir logs --knobs slurm train.py",
    ),
)
@click.option("-n", "--ranks", type=int, help="Number of ranks; in an allocation its tasks.")
@click.option("--ranks-per-node", type=int, metavar="N", help="In an allocation: at most so many.")
@click.option(
    "--launcher",
    type=click.Choice(LAUNCHERS),
    default="auto",
    show_default=True,
    help="In an allocation: auto is srun where it can start this MPI.",
)
@click.option("--mpi", metavar="PLUGIN", help="Of srun; by default pmix or pmi2, as MPI needs.")
@click.option(
    "--knobs",
    metavar="PATH",
    help="Set the variables of this file, or of env.openmpi or env.mpich in this folder.",
)
@click.option("--label", is_flag=True, help="Begin each line of output with its rank.")
@click.option("--log-dir", metavar="DIR", help="One file a rank; only rank 0's output is shown.")
@click.option(
    "--requeue", is_flag=True, help="Have SLURM start the job again if it ends with exit code 75."
)
@click.option(
    "--watch/--no-watch",
    default=None,
    help="Hear from every rank how it ended; by default in an allocation.",
)
@click.option("--dry-run", is_flag=True, help="Print the command, do not start it.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(
    ranks: int | None,
    ranks_per_node: int | None,
    launcher: str,
    mpi: str | None,
    knobs: str | None,
    label: bool,
    log_dir: str | None,
    requeue: bool,
    watch: bool | None,
    dry_run: bool,
    program: tuple[str, ...],
) -> int:
    """Start PROGRAM on a number of ranks, by the launcher that belongs to the installed mpi4py.

    The exact command is printed, so that it can be pasted and changed.  The exit code is 0 only if
    every rank finished well, else that of the first rank that did not.  In a SLURM allocation the
    launcher is srun, with the plugin that this MPI needs, or its own mpiexec.
    """
    for name, number in (("-n", ranks), ("--ranks-per-node", ranks_per_node)):
        if number is not None and number < 1:
            raise InvalidArgument(f"{name} {number}: allowed are whole numbers >= 1")
    check_not_nested(os.environ)
    allocation = Allocation.find()
    check_options(allocation, ranks, ranks_per_node, launcher, mpi, requeue)
    watched = watch or bool(label or log_dir) or (allocation is not None and watch is None)
    if watch is False and (label or log_dir or requeue):
        raise InvalidArgument("--no-watch: goes without --label, --log-dir and --requeue")
    arguments = as_command(program, watched)
    vendor = library_vendor()
    if allocation is None:
        launch = here(vendor, ranks or 1)
    else:
        plugin = choose_launcher(vendor, launcher, mpi)
        launch = allocated(vendor, plugin, allocation, ranks, ranks_per_node)
    if knobs:
        more = {k: v for k, v in read_knobs(knobs, vendor).items() if k not in os.environ}
        launch.settings.update(more)
    line = launch.line(arguments)
    if dry_run:
        click.echo(line)
        return 0
    click.echo(line, err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    environ = {TERMINAL: str(columns), **os.environ, **launch.settings}
    if not watched:
        become([*launch.launcher, *arguments], environ)
    guard = Watch(launch.ranks, label, log_dir and os.path.abspath(log_dir))
    status = guard.run([*launch.launcher, *guard.command(arguments)], environ)
    if requeue and status == os.EX_TEMPFAIL:
        assert allocation is not None
        start_again(allocation)
    return status


def check_options(
    allocation: Allocation | None,
    ranks: int | None,
    per_node: int | None,
    launcher: str,
    mpi: str | None,
    again: bool,
) -> None:
    """Raise InvalidArgument for options that mean nothing outside of an allocation, or lack."""
    given = {
        "--ranks-per-node": per_node is not None,
        "--launcher srun": launcher == "srun",
        "--mpi": mpi is not None,
        "--requeue": again,
    }
    if allocation is None and any(given.values()):
        name = next(name for name, there in given.items() if there)
        raise InvalidArgument(
            f"{name} is for a SLURM allocation, and this is none: submit a script by sbatch, or "
            "ask for one by salloc"
        )
    if allocation is None and ranks is None:
        raise InvalidArgument("-n is missing: allowed are whole numbers >= 1")


def check_not_nested(environ: Mapping[str, str]) -> None:
    """Raise LaunchError inside of an MPI job: an mpiexec in each rank helps nobody."""
    step = environ.get("SLURM_STEP_NUM_TASKS", "1")
    launched = launched_rank({k: v for k, v in environ.items() if not k.startswith("SLURM")})
    if launched is None and (not step.isdigit() or int(step) < 2):
        return
    rank = launched if launched is not None else environ.get("SLURM_PROCID", "?")
    raise LaunchError(
        f"mpidist run was itself started by an MPI launcher, as rank {rank}: every rank would "
        "start a job of its own.  Start the program directly under that launcher (mpirun -n N "
        "python train.py), or call mpidist run outside of it"
    )
