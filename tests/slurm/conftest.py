"""One real Slurm for all tests here: 3 nodes of 2 cores, joined by 1 Gbit/s and 100 µs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import PYTHONS
from minicluster import Refused
from slurm_cluster import LONG, PATH, SlurmCluster, why_not

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cluster():
    if reason := why_not():
        pytest.skip(reason)
    running = SlurmCluster(nodes=3, rate=1e9, delay=100e-6, gpus=1)
    try:
        running.__enter__()
    except Refused as why:
        pytest.skip(f"needs network namespaces and a TUN device: {why}")
    yield running
    running.stop()
    assert not running._inhabitants()


def environment(mpi: str) -> dict[str, str]:
    """The environment of a user who works with this MPI."""
    beside = str(Path(PYTHONS[mpi]).parent)
    return {"PATH": f"{beside}:{PATH}", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


@pytest.fixture(params=PYTHONS if LONG else ["this"])
def mpi(request):
    """Open MPI, and in `make test-slurm` MPICH where there is one, by their users' environments."""
    return request.param


@pytest.fixture
def user(mpi):
    return environment(mpi)


@pytest.fixture
def folder(tmp_path):
    """A folder that looks like a checkout, in which jobs may write."""
    for name in ("slurm", "examples", "tests", "setup.cfg"):
        os.symlink(ROOT / name, tmp_path / name)
    return tmp_path
