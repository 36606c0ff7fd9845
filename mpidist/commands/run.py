"""``mpidist run``: start the launcher that belongs to the installed mpi4py, in SLURM too."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import click

from ..errors import InvalidArgument, LaunchError
from ..launcher.allocation import Allocation, in_step, kill_wait, whole_job
from ..launcher.command_line import Launch, allocated, as_command, become, here, start_again
from ..launcher.mpi import MPICH, Library, find_library, read_knobs
from ..launcher.slurm import LAUNCHERS, choose_launcher
from ..launcher.watch import MPI_WITHIN, TO_RANKS, Signals, Watch
from .console import TERMINAL, examples, launched_rank


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


def check_log_dir(folder: str) -> None:
    """Raise InvalidArgument if no logs can be written into a folder."""
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write into {folder!r}")
    except OSError as error:
        raise InvalidArgument(
            f"--log-dir {folder!r}: {error}; allowed is a folder that can be made and written to"
        ) from None


def check_not_nested(environ: Mapping[str, str]) -> None:
    """Raise LaunchError inside of an MPI job: an mpiexec in each rank helps nobody.

    A shell of ``srun --pty bash`` is a step of one task, and no job.
    """
    step = environ.get("SLURM_STEP_NUM_TASKS", "")
    sizes = (environ.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    alone = step == "1" and all(size in ("", "1") for size in sizes)
    launched = launched_rank({k: v for k, v in environ.items() if not k.startswith("SLURM")})
    if alone or (launched is None and not step):
        return
    rank = launched if launched is not None else environ.get("SLURM_PROCID", "?")
    raise LaunchError(
        f"mpidist run was itself started by an MPI launcher, as rank {rank}: every rank would "
        "start a job of its own.  Start the program directly under that launcher (mpirun -n N "
        "python train.py), or call mpidist run outside of it.  If this is the script of a new job "
        "that was submitted from within such a rank: unset SLURM_STEP_NUM_TASKS and PMIX_RANK first"
    )


REQUEUES = 20  # by default
OF_A_STEP = ("PMI_", "PMI2_", "PMIX_", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND")
PMI2 = "--mpi=pmi2"  # under which MPI now and then does not start


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
    "--requeue-limit",
    type=int,
    help=f"How often at most, by default {REQUEUES} times; then the job fails.",
)
@click.option(
    "--watch/--no-watch",
    default=None,
    help="Hear from every rank how it ended; by default in an allocation, and with MPICH.",
)
@click.option(
    "--start-timeout",
    type=float,
    metavar="SECONDS",
    help="End a watched job if MPI has not started on all ranks so long after the last began to; "
    f"by default {MPI_WITHIN:g}.",
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
    requeue_limit: int | None,
    watch: bool | None,
    start_timeout: float | None,
    dry_run: bool,
    program: tuple[str, ...],
) -> int:
    """Start PROGRAM on a number of ranks, by the launcher that belongs to the installed mpi4py.

    The exact command is printed, so that it can be pasted and changed.  The exit code is 0 only if
    every rank finished well, else that of the first rank that did not.  In a SLURM allocation the
    launcher is srun, with the plugin that this MPI needs, or its own mpiexec.
    """
    numbers = {"-n": ranks, "--ranks-per-node": ranks_per_node, "--requeue-limit": requeue_limit}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise InvalidArgument(f"{name} {number}: allowed are whole numbers >= 1")
    if start_timeout is not None and not start_timeout > 0:
        raise InvalidArgument(f"--start-timeout {start_timeout:g}: allowed are seconds > 0")
    check_not_nested(os.environ)
    allocation = Allocation.find()
    if allocation is not None:
        allocation = whole_job(allocation)
    check_options(allocation, ranks, ranks_per_node, launcher, mpi, requeue)
    if requeue_limit is not None and not requeue:
        raise InvalidArgument(f"--requeue-limit {requeue_limit}: goes with --requeue only")
    asked = bool(label or log_dir or start_timeout)
    if watch is False and (asked or log_dir is not None or requeue):
        raise InvalidArgument(
            "--no-watch: goes without --label, --log-dir, --requeue and --start-timeout"
        )
    signals = Signals()
    with signals.taken(*TO_RANKS):  # the ranks are to get what comes before they are there
        library = find_library()
        # MPICH's launcher does not see a rank that ends by an exit code without MPI_Finalize.
        blind = allocation is not None or library.vendor == MPICH
        watched = watch or asked or (blind and watch is None)
        arguments = as_command(program, watched)
        launch = plan(library, allocation, ranks, ranks_per_node, launcher, mpi, knobs)
        click.echo(launch.line(arguments), err=not dry_run)
        if dry_run:
            return 0
        if log_dir is not None:
            check_log_dir(log_dir)
        seconds = start_timeout or MPI_WITHIN
        watching = Watching(label, log_dir, signals, seconds) if watched else None
        instead = partial(plan, library, allocation, ranks, ranks_per_node, "mpiexec", None, knobs)
        free = (launcher, mpi) == ("auto", None)
        status = start_twice(launch, arguments, watching, instead if free else None)
        if requeue and status == os.EX_TEMPFAIL:
            assert allocation is not None
            start_again(allocation, requeue_limit or REQUEUES)
    return status


def plan(
    library: Library,
    allocation: Allocation | None,
    ranks: int | None,
    per_node: int | None,
    launcher: str,
    mpi: str | None,
    knobs: str | None,
) -> Launch:
    """Find out what has to be started, and with which variables."""
    if allocation is None:
        launch = here(library.vendor, ranks or 1)
    else:
        plugin = choose_launcher(library, launcher, mpi)
        launch = allocated(library.vendor, plugin, allocation, ranks, per_node)
    if knobs:
        more = {k: v for k, v in read_knobs(knobs, library.vendor).items() if k not in os.environ}
        launch.settings.update(more)
    return launch


@dataclass(frozen=True)
class Watching:
    """How a launch is watched; see Watch."""

    label: bool
    log_dir: str | None
    signals: Signals
    start_timeout: float = MPI_WITHIN


def start_twice(
    launch: Launch,
    arguments: list[str],
    watching: Watching | None,
    instead: Callable[[], Launch] | None,
) -> int:
    """Start the launcher, and where SLURM's pmi2 failed, what is given instead of it."""
    status, begun = start(launch, arguments, watching)
    if status and not begun and PMI2 in launch.launcher:
        click.echo(f"mpidist run: no rank came through MPI_Init under srun {PMI2}", err=True)
        if instead is not None:
            other = instead()
            click.echo(f"mpidist run: once more: {other.line(arguments)}", err=True)
            status, _ = start(other, arguments, watching)
    return status


def start(launch: Launch, arguments: list[str], watching: Watching | None) -> tuple[int, bool]:
    """Start the launcher, or become it if nobody is to watch it.

    Returns
    -------
    status : int
        The exit code.
    begun : bool
        False if the ranks began to start MPI, and none came through it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Through a pipe, line by line, no bar can be drawn.
    seen = sys.stdout.isatty() and not (watching and (watching.label or watching.log_dir))
    columns = shutil.get_terminal_size().columns if seen else 0
    environ = {**own_environment(os.environ), **launch.settings, TERMINAL: str(columns)}
    if watching is None:
        become([*launch.launcher, *arguments], environ)
    haste = kill_wait() if launch.allocated else None
    logs = watching.log_dir and os.path.abspath(watching.log_dir)
    settings = (launch.ranks, watching.label, logs, haste, watching.signals, watching.start_timeout)
    guard = Watch(*settings)
    status = guard.run([*launch.launcher, *guard.command(arguments)], environ)
    return status, not guard.never_started


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Give what a launcher is started with: nothing of the step that this shell may be."""
    foreign = OF_A_STEP if in_step(environ) else ()
    kept = "PMIX_MCA_"  # settings, not the address of a server
    return {k: v for k, v in environ.items() if k.startswith(kept) or not k.startswith(foreign)}
