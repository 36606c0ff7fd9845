"""Start the jobs of failure_jobs.py and the like under each MPI that is there."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from mpidist.launcher.mpi import OPEN_MPI, find_library
from tests.support import failure_jobs, processes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT = 150.0  # seconds, of a job that hangs: no other takes so long, however loaded the machine


def pythons() -> dict[str, str]:
    """This Python, and the one with MPICH where that is another and there is one."""
    found = {"this": sys.executable}
    other = os.environ.get("MPIDIST_MPICH_PYTHON", str(ROOT / ".venv-mpich/bin/python"))
    if Path(other).exists() and Path(other).absolute() != Path(sys.executable).absolute():
        found["mpich"] = str(Path(other).absolute())
    return found


PYTHONS = pythons()
OTHERS = {name: python for name, python in PYTHONS.items() if python != sys.executable}
other_mpis = pytest.mark.parametrize(
    "python",
    list(OTHERS.values()) or [pytest.param("", marks=pytest.mark.skip(reason="needs MPICH, too"))],
    ids=list(OTHERS) or ["none"],
)
each_mpi = pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())


@dataclass
class Job(processes.Finished):
    """What became of a job, and what its ranks said, by rank (failure_jobs.py)."""

    words: list[list[str]]


def job(
    python: str,
    ranks: int,
    *arguments: str,
    script: str = "failure_jobs.py",
    options: tuple[str, ...] = (),
    **env: str,
) -> Job:
    """Run one job to its end, which must come in time; `options` are of mpiexec."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = processes.mpiexec(ranks, str(HERE / script), *arguments, python=python)
    command[1:1] = options
    with tempfile.TemporaryDirectory() as folder:
        environment = processes.environment(PYTHONPATH=path, **{failure_jobs.FOLDER: folder}, **env)
        finished = processes.run(command, LIMIT, environment)
        words = [failure_jobs.words(folder, rank) for rank in range(ranks)]
    assert not finished.timed_out, finished.output
    return Job(**vars(finished), words=words)


@contextmanager
def no_memory_left_behind() -> Iterator[None]:
    """Whatever a job within has made in /dev/shm must go; of another job, some may come and go.

    But its flight records, which are there for after the crash, and the folders for new starts, of
    which no job here has one: a job beside may keep its own for minutes.
    """

    def named():
        found = {path.name for path in Path("/dev/shm").glob("mpidist-*")}
        return {x for x in found if not x.startswith(("mpidist-flight-", "mpidist-vaults-"))}

    before = named()
    yield
    left, until = named() - before, time.monotonic() + 60
    while left:
        assert time.monotonic() < until, f"left behind in /dev/shm: {sorted(left)}"
        time.sleep(0.05)
        left &= named()


def said(job: Job, text: str) -> list[int]:
    """The ranks that said what begins so."""
    return [rank for rank, words in enumerate(job.words) if any(w.startswith(text) for w in words)]


@cache
def tolerant() -> bool:
    """Whether this MPI can go on after a loss."""
    library = find_library()
    return library.vendor == OPEN_MPI and library.version >= (5,)
