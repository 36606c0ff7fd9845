"""Start the jobs of tests/failure_jobs.py and the like under each MPI that is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import processes
import pytest

HERE = Path(__file__).resolve().parent
LIMIT = 40.0  # seconds; no job that is meant to fail may take longer


def pythons() -> dict[str, str]:
    """This Python, and the one with MPICH where that is another and there is one."""
    found = {"this": sys.executable}
    other = os.environ.get("MPIDIST_MPICH_PYTHON", str(HERE.parent / ".venv-mpich/bin/python"))
    if Path(other).exists() and Path(other).absolute() != Path(sys.executable).absolute():
        found["mpich"] = str(Path(other).absolute())
    return found


PYTHONS = pythons()
each_mpi = pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())


def job(
    python: str, ranks: int, *arguments: str, script: str = "failure_jobs.py", **env: str
) -> processes.Finished:
    """Run one job to its end, which must come in time."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = processes.environment(PYTHONPATH=path, **env)
    command = processes.mpiexec(ranks, str(HERE / script), *arguments, python=python)
    finished = processes.run(command, LIMIT, environment)
    assert not finished.timed_out, finished.output
    return finished


def said(finished: processes.Finished, text: str) -> list[int]:
    """The ranks that said so."""
    lines = finished.output.replace("\0", "").splitlines()
    return sorted(
        {int(line.split(">")[0].rpartition("<")[2]) for line in lines if f"> {text}" in line}
    )
