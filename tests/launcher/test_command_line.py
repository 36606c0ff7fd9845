"""The launcher of an allocation, with its variables."""

import pytest

from mpidist.errors import LaunchError
from mpidist.launcher import command_line
from mpidist.launcher.allocation import SlurmAllocation
from tests.support.launcher_kits import JOB


def test_slurm_launch_refuses_a_heterogeneous_job():
    parts = SlurmAllocation.find({**JOB, "SLURM_HET_SIZE": "2"})
    with pytest.raises(LaunchError, match="job 7 is heterogeneous, in 2 parts"):
        command_line.slurm_launch("MPICH", "pmi2", parts, None, None)


def test_slurm_launch_passes_the_environment_on(monkeypatch):
    """As of sbatch --export=NONE, which every srun of the job would inherit."""
    monkeypatch.setattr(command_line, "threads_per_core", lambda _: 1)
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    found = command_line.slurm_launch("MPICH", "pmi2", SlurmAllocation.find(JOB), None, None)
    assert found.settings["SLURM_EXPORT_ENV"] == "ALL"
