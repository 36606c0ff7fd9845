"""One real Slurm for all tests here: 3 nodes of 2 cores, joined by 1 Gbit/s and 100 µs."""

from __future__ import annotations

import os

import pytest

from tests.support.jobs import PYTHONS
from tests.support.minicluster import running
from tests.support.slurm_cluster import LONG, ROOT, SlurmCluster, user_environment, why_not


def pytest_collection_modifyitems(items):
    """Give the long tests the time that they take; a hang still ends."""
    if LONG:
        for item in items:
            if "cluster" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def cluster():
    if reason := why_not():
        pytest.skip(reason)
    with running(SlurmCluster(nodes=3, rate=1e9, delay=100e-6, gpus=1)) as started:
        yield started


@pytest.fixture(params=PYTHONS if LONG else ["this"])
def mpi(request):
    """Open MPI, and in `make test-slurm` MPICH where there is one, by their users' environments."""
    return request.param


@pytest.fixture
def user(mpi):
    return user_environment(mpi)


@pytest.fixture
def folder(tmp_path):
    """A folder that looks like a checkout, in which jobs may write."""
    for name in ("slurm", "examples", "tests", "setup.cfg"):
        os.symlink(ROOT / name, tmp_path / name)
    return tmp_path
