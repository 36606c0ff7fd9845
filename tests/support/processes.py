"""Start a program under mpiexec or alone, with a hard time limit and nothing left behind.

For the launcher and for every test that starts a job of its own.  Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path


def load_processes():
    """Load mpidist/launcher/processes.py alone: a serial launch must load no MPI library."""
    path = Path(__file__).resolve().parents[2] / "mpidist" / "launcher" / "processes.py"
    spec = importlib.util.spec_from_file_location("_processes", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_processes = load_processes()
Finished, run_limited, stat = _processes.Finished, _processes.run_limited, _processes.stat
end, descendants = _processes.end_processes, _processes.descendants

# What the machine of a test needs: any user, more ranks than cores, and no rank tied to a core.
OVERSUBSCRIBED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # these two for Open MPI 4
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Open MPI's one-sided transport over libfabric sleeps 1 s in MPI_Init before it finds no fabric and
# leaves: of a two-rank job that does little, most of the time.
NO_FABRIC = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}  # mtl: see mpidist/launcher/mpi.py
# What an mpiexec leaves in the environment of its processes, and another one would stumble over.
OF_A_LAUNCH = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDI_", "HYDRA_")


def mpiexec(ranks: int, *program: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs `program` with the mpiexec beside `python`."""
    return [str(Path(python).parent / "mpiexec"), "-n", str(ranks), python, *program]


def begun(pid: int) -> str:
    """Return when a process has begun, as Linux counts it; "" once it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def environment(**more: str) -> dict[str, str]:
    """Return this environment, without a launch that it is part of, ready for an mpiexec.

    And without the wish to write no bytecode: each of hundreds of ranks would compile mpidist anew,
    which takes longer than all else that its import does. And without the names by which pytest
    knows a continuous-integration server: it cuts no line of its summary there.

    A launch keeps its files in a folder of its own.  Open MPI names them by mpiexec's process
    number, and a later mpiexec with that number cannot start where one was killed: "The PMIx
    server's listener thread failed to start".  A suite uses each number several times.
    """
    folder = tempfile.mkdtemp(dir=_folder().name)
    unwanted = (*OF_A_LAUNCH, "PYTHONDONTWRITEBYTECODE")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    for name in ("CI", "BUILD_NUMBER"):
        plain.pop(name, None)
    apart = {"PRTE_MCA_prte_tmpdir_base": folder, "PYTHONUNBUFFERED": "1"}
    return {**plain, **OVERSUBSCRIBED, **NO_FABRIC, **apart, **more}


@cache
def _folder() -> tempfile.TemporaryDirectory:
    """Return the folder of this process's launches; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="mpi-")


def run(
    command: Sequence[str],
    limit: float | Callable[[], float],
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    on_line: Callable[[str], object] = lambda line: None,
) -> Finished:
    """Run `command` within the limit; by default in the environment of `environment`.

    Its output is without the NULs that prterun writes, now and then at the begin of another's line.
    """
    finished = run_limited(command, limit, environment() if env is None else env, cwd, on_line)
    finished.output = finished.output.replace("\0", "")
    return finished
