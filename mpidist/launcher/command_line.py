"""The launcher of a job, with its arguments and environment variables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import LaunchError
from .allocation import SlurmAllocation, cores, in_step, threads_per_core
from .mpi import AS_ROOT, OPEN_MPI, YIELD, environment_for, find_launcher
from .slurm import place, slurm_command


@dataclass(frozen=True)
class Launch:
    """A launcher (mpiexec or srun) with its arguments and environment variables."""

    ranks: int
    launcher: list[str]  # with its arguments, in front of the program
    settings: dict[str, str]  # environment variables, beside those of this process
    allocated: bool  # whether in a SLURM allocation

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
    left_out: Sequence[str] = (),
) -> Launch:
    """Return the launch on the nodes of an allocation, by srun with `plugin` or by mpiexec (None).

    `left_out` are nodes that SLURM has granted, and `allocation` has no more, as they are down.
    LaunchError is raised if the job is heterogeneous.
    """
    if allocation.parts > 1:
        raise LaunchError(
            f"job {allocation.job} is heterogeneous, in {allocation.parts} parts, and mpidist run "
            "starts ranks on one set of nodes: submit a job of one part, or start the program by "
            "srun --mpi=… --het-group=… yourself"
        )
    placed = place(allocation, ranks, per_node, threads_per_core(allocation))
    placed = replace(placed, left_out=tuple(left_out))
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
