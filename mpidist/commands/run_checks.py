"""What ``mpidist run`` refuses before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import InvalidArgument, LaunchError
from .allocation import Allocation
from .common import launched_rank


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
