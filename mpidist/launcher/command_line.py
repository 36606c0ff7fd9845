"""What ``mpidist run`` starts: the line of the launcher, its variables, and the program."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click

from ..errors import InvalidArgument, LaunchError
from .allocation import Allocation, about_job, cores, in_step, threads_per_core
from .mpi import AS_ROOT, OPEN_MPI, YIELD, ask, find_launcher, folder_of, settings_for
from .slurm import place, slurm_command

REQUEUED_WITHIN = 60.0  # seconds in which its controller answers
ENDING = ["-m", "mpi4py"]
ENDED_WITHIN = 120.0  # seconds in which SLURM ends a job that it was told to requeue


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    Attributes
    ----------
    ranks : int
        How many.
    launcher : list of str
        The line before the program.
    settings : dict
        Variables that it needs.
    allocated : bool
        Whether this is in a SLURM allocation.
    """

    ranks: int
    launcher: list[str]
    settings: dict[str, str]
    allocated: bool

    def line(self, program: list[str]) -> str:
        """Give the command as one would type it."""
        words = [f"{name}={value}" for name, value in self.settings.items()]
        return shlex.join([*["env"] * bool(words), *words, *self.launcher, *program])


def here(vendor: str, ranks: int) -> Launch:
    """Give the launch on this machine."""
    settings = settings_for(vendor, ranks, cores(), os.geteuid() == 0, os.environ)
    return Launch(ranks, [find_launcher(vendor), "-n", str(ranks)], settings, False)


def allocated(
    vendor: str,
    plugin: str | None,
    allocation: Allocation,
    ranks: int | None,
    per_node: int | None,
) -> Launch:
    """Give the launch on the nodes of an allocation.

    Raises
    ------
    LaunchError
        If the job is heterogeneous.
    InvalidArgument
        If the ranks do not fit.
    """
    if allocation.parts > 1:
        raise LaunchError(
            f"job {allocation.job} is heterogeneous, in {allocation.parts} parts, and mpidist run "
            "starts ranks on one set of nodes: submit a job of one part, or start the program by "
            "srun --mpi=… --het-group=… yourself"
        )
    placed = place(allocation, ranks, per_node, threads_per_core(allocation))
    wanted = {"OMP_NUM_THREADS": str(placed.cores)}
    if vendor == OPEN_MPI:
        wanted |= AS_ROOT if plugin is None and os.geteuid() == 0 else {}
        wanted |= YIELD if placed.crowded else {}
    if in_step(os.environ):
        wanted["SLURM_OVERLAP"] = "1"  # else a step inside of this one waits for its end
    settings = {name: value for name, value in wanted.items() if name not in os.environ}
    if in_step(os.environ) and plugin is None and allocation.tasks:  # mpiexec reads these
        settings["SLURM_TASKS_PER_NODE"] = ",".join(map(str, allocation.tasks))
        settings["SLURM_NNODES"] = str(allocation.nodes)
        settings["SLURM_NTASKS"] = settings["SLURM_NPROCS"] = str(sum(allocation.tasks))
    if os.environ.get("SLURM_EXPORT_ENV", "ALL") != "ALL":
        # sbatch --export=NONE: the srun by which an mpiexec starts its daemons would take nothing.
        settings["SLURM_EXPORT_ENV"] = "ALL"
    return Launch(placed.ranks, slurm_command(vendor, plugin, placed), settings, True)


def become(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Have the launcher take the place of this process."""
    path = shutil.which(command[0]) or command[0]
    try:
        os.execve(path, command, environ)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}") from error


def start_again(allocation: Allocation, most: int) -> None:
    """Have SLURM put this job back into its queue, which ends it: it starts anew.

    A batch script that ends by itself meanwhile would count as failed, and not be queued.

    Parameters
    ----------
    allocation : Allocation
        Of the job; of an array that one job is queued.
    most : int
        How often at most.

    Raises
    ------
    LaunchError
        If it was queued so often already, or SLURM does not do it.
    """
    said = about_job(allocation.job).get("Restarts", "")  # what is inherited may be another job's
    restarts = int(said) if said.isdigit() else allocation.restarts
    if restarts >= most:
        raise LaunchError(
            f"exit code {os.EX_TEMPFAIL}, but job {allocation.job} was requeued "
            f"{restarts} times already: allowed are {most} (--requeue-limit)"
        )
    count = f"{restarts + 1} of {most}"
    click.echo(
        f"mpidist run: exit code {os.EX_TEMPFAIL}: requeuing job {allocation.job}, {count}",
        err=True,
    )
    sys.stderr.flush()
    done = ask(["scontrol", "requeue", allocation.job], REQUEUED_WITHIN)
    if done.returncode:
        raise LaunchError(f"scontrol requeue {allocation.job}: {done.stderr.strip()}")
    time.sleep(ENDED_WITHIN)
    raise LaunchError(f"SLURM has not ended job {allocation.job} within {ENDED_WITHIN:g} s")


def as_command(program: tuple[str, ...], together: bool = False) -> list[str]:
    """Give the command of one rank: Python for scripts, modules and mpidist itself.

    A script that fails on one rank ends on all (``-m mpi4py``), also before ``mpidist.init()``;
    with `together` a module as well.  (Pytest, for example, would lose its last lines.)

    Raises
    ------
    InvalidArgument
        If there is no such script or program.
    """
    first, rest = program[0], list(program[1:])
    if first == "mpidist":
        return [sys.executable, "-m", "mpidist", *rest]
    if first in ("-m", "-c"):
        return [sys.executable, *ending(program, together), *program]
    if first.startswith("-"):
        raise InvalidArgument(f"{first}: no option of run; options stand before the program")
    if first.endswith(".py") or first.endswith(".pyz"):
        if not Path(first).is_file():
            raise InvalidArgument(f"{first}: there is no such script in {folder_of(Path(first))}")
        return [sys.executable, *ENDING, *program]
    if first in ("python", "python3"):
        options = count_options(rest)
        return [sys.executable, *rest[:options], *ending(rest[options:], together), *rest[options:]]
    if shutil.which(first) is None:
        hint = ""
        if first in click.get_current_context().find_root().command.commands:  # type: ignore[attr-defined]
            hint = f"; did you mean: mpidist {first}?"
        raise InvalidArgument(f"{first}: there is no such script or program{hint}")
    return list(program)


def count_options(arguments: Sequence[str]) -> int:
    """Count the words of Python's own options, which stand before what it is to run."""
    count = 0
    while count < len(arguments) and re.fullmatch("-[^mc].*", arguments[count]):
        if re.fullmatch("-[^WX-][a-zA-Z]*[mc]", arguments[count]):  # -Om module
            return len(arguments)
        count += 2 if arguments[count] in ("-W", "-X", "--check-hash-based-pycs") else 1
    return min(count, len(arguments))


def ending(program: Sequence[str], together: bool) -> list[str]:
    """Give the words by which a failure on one rank ends all, in front of what Python runs."""
    return ENDING if program and (together or program[0] != "-m") else []
