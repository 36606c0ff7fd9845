"""The command line of a job: launcher, environment variables, program."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidArgument, LaunchError
from .allocation import SlurmAllocation, cores, in_step, threads_per_core
from .mpi import AS_ROOT, OPEN_MPI, YIELD, environment_for, find_launcher, folder_of
from .slurm import place, slurm_command

PYTHON = ("python", "python3")  # they mean this interpreter, also by its path
ABORT_ON_ERROR = ["-m", "mpi4py"]  # an exception on one rank ends the job on all
RANK_PROGRAM = str(Path(__file__).with_name("rank_program.py"))


@dataclass(frozen=True)
class Launch:
    """A launcher (mpiexec or srun) with its arguments and environment variables.

    Attributes
    ----------
    ranks : int
        Number of ranks.
    launcher : list of str
        The launcher and its arguments, in front of the program.
    settings : dict
        Environment variables to set for it, beside those of this process.
    allocated : bool
        Whether the launch is in a SLURM allocation.
    """

    ranks: int
    launcher: list[str]
    settings: dict[str, str]
    allocated: bool

    def line(self, program: list[str], settings: bool = True) -> str:
        """Return the command for `program` as text for a shell; with `settings`, after ``env``."""
        words = [f"{name}={value}" for name, value in self.settings.items() if settings]
        return shlex.join([*["env"] * bool(words), *words, *self.launcher, *program])


def local_launch(vendor: str, ranks: int) -> Launch:
    """Return the launch of `ranks` ranks on this machine, by the mpiexec of an MPI vendor."""
    settings = environment_for(vendor, ranks, cores(), os.geteuid() == 0, os.environ)
    return Launch(ranks, [find_launcher(vendor), "-n", str(ranks)], settings, False)


def slurm_launch(
    vendor: str,
    plugin: str | None,
    allocation: SlurmAllocation,
    ranks: int | None,
    per_node: int | None,
) -> Launch:
    """Return the launch on the nodes of an allocation, by srun with `plugin` or by mpiexec (None).

    Raises
    ------
    LaunchError
        If the job is heterogeneous.
    InvalidArgument
        If no number of ranks is known, or the ranks need more nodes than there are.
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
        wanted |= YIELD if placed.oversubscribed else {}
    if in_step(os.environ):
        wanted["SLURM_OVERLAP"] = "1"  # otherwise a step inside this one waits for its end
    settings = {name: value for name, value in wanted.items() if name not in os.environ}
    if in_step(os.environ) and plugin is None and allocation.tasks:  # mpiexec reads these
        settings["SLURM_TASKS_PER_NODE"] = ",".join(map(str, allocation.tasks))
        settings["SLURM_NNODES"] = str(allocation.nodes)
        settings["SLURM_NTASKS"] = settings["SLURM_NPROCS"] = str(sum(allocation.tasks))
    if os.environ.get("SLURM_EXPORT_ENV", "ALL") != "ALL":
        # With sbatch --export=NONE the daemons of an mpiexec would get an empty environment.
        settings["SLURM_EXPORT_ENV"] = "ALL"
    return Launch(placed.ranks, slurm_command(vendor, plugin, placed), settings, True)


def rank_command(program: Sequence[str], modules_too: bool = False) -> list[str]:
    """Return the command of one rank: `program`, after Python if it is a script, ``-m`` or ``-c``.

    Scripts run under ``-m mpi4py``, by which an exception on one rank ends all ranks, even before
    ``mpidist.init()``.  Modules do so only with `modules_too`: pytest, for example, would lose its
    last lines.  ``mpidist`` runs as ``python -m mpidist``.

    Raises
    ------
    InvalidArgument
        If the script or program does not exist, or is an unknown option of ``mpidist run``.
    """
    first, rest = program[0], list(program[1:])
    if first == "mpidist":
        return [sys.executable, "-m", "mpidist", *rest]
    if first in ("-m", "-c"):
        return [sys.executable, *abort_words(program, modules_too), *program]
    if first.startswith("-"):
        raise InvalidArgument(
            f"{first}: not an option of mpidist run; its options stand before the program"
        )
    if first.endswith(".py") or first.endswith(".pyz"):
        if not Path(first).is_file():
            raise InvalidArgument(f"{first}: no such script in {folder_of(Path(first))}")
        return [sys.executable, *ABORT_ON_ERROR, *program]
    if first in PYTHON or os.path.abspath(first) in _own_python():
        options, script = rest[: count_options(rest)], rest[count_options(rest) :]
        return [sys.executable, *options, *abort_words(script, modules_too), *script]
    if shutil.which(first) is None:
        raise InvalidArgument(f"{first}: no such script or program")
    return list(program)


def _own_python() -> list[str]:
    """Return the paths that mean this interpreter, such as ``.venv/bin/python3``."""
    folder = os.path.dirname(sys.executable)
    return [sys.executable, *(os.path.join(folder, name) for name in PYTHON)]


def count_options(arguments: Sequence[str]) -> int:
    """Return how many arguments of Python are options, before the script, ``-m`` or ``-c``."""
    count = 0
    while count < len(arguments) and re.fullmatch("-[^mc].*", arguments[count]):
        if re.fullmatch("-[^WX-][a-zA-Z]*[mc]", arguments[count]):  # -Om module
            return len(arguments)
        count += 2 if arguments[count] in ("-W", "-X", "--check-hash-based-pycs") else 1
    return min(count, len(arguments))


def abort_words(program: Sequence[str], modules_too: bool) -> list[str]:
    """Return ``-m mpi4py``, with which an exception on one rank ends all ranks, or an empty list.

    It is empty for a module (``-m NAME``) unless `modules_too`, and for no program.
    """
    return ABORT_ON_ERROR if program and (modules_too or program[0] != "-m") else []


def reporting(command: Sequence[str]) -> list[str]:
    """Return the command of a rank, changed so that it reports the exception that ends it.

    Scripts and modules run by rank_program.py instead of ``-m mpi4py``; other programs do not
    report, and are not changed.
    """
    at = 1 + count_options(command[1:])
    python, program = list(command[:at]), list(command[at:])
    if python[0] == sys.executable and program[:2] == ABORT_ON_ERROR:
        return [*python, RANK_PROGRAM, *program[2:]]
    if python[0] == sys.executable and program[:1] == ["-m"]:
        return [*python, RANK_PROGRAM, "--no-abort", *program]
    return list(command)
