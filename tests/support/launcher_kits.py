"""Jobs under ``mpidist run`` without an MPI: a shell, or a rank itself, is the launcher."""

from __future__ import annotations

import sys
from typing import Any

from mpidist.launcher.connections import Connections
from mpidist.launcher.notes import Notes
from mpidist.launcher.program import RANK_PROGRAM
from mpidist.launcher.supervisor import Supervisor
from tests.support.processes import environment

RANK = {**environment(), "OMPI_COMM_WORLD_RANK": "0"}
JOB = {  # the environment of an allocation
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_PARTITION": "short",
}
PTY = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # a shell of srun
KINDS = Connections, Notes  # with monitors, and without


def supervised(ranks: int, kind: type = Connections, **how: Any) -> Supervisor:
    """Return a supervisor of monitored ranks, or of ranks that send notes."""
    return Supervisor(kind(ranks), **how)


def monitored(job: Supervisor, *program: str) -> int:
    """Run the monitor of rank 0, with a program, in place of a launcher; return the exit code."""
    return job.run(job.reports.command(list(program)), RANK)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def rank_program(tmp_path, text: str) -> list[str]:
    """Return the command of a script that reports its end."""
    (tmp_path / "program.py").write_text(text)
    return [sys.executable, RANK_PROGRAM, str(tmp_path / "program.py")]
