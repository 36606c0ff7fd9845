"""The plugin for users: a suite of its own, without this project's conftest."""

import sys

import pytest

from tests.support import processes
from tests.support.jobs import each_mpi

SETTINGS = """[pytest]
addopts = -ra -p no:cacheprovider --color=no -p mpidist.pytest --with-mpi
timeout = {limit}
"""
SUITE = """
import os, signal, time
import numpy as np

def test_passes(comm):
    assert comm.allreduce(1) == comm.size
"""


def run(tmp_path, text, *options, python=sys.executable, ranks=2, limit=100, **env):
    """Run a suite on some ranks; return the status and the output."""
    (tmp_path / "pytest.ini").write_text(SETTINGS.format(limit=limit))
    (tmp_path / "test_suite.py").write_text(SUITE + text)
    words = ["-m", "pytest", "--rank-grace=4", *options, str(tmp_path / "test_suite.py")]
    command = processes.mpiexec(ranks, *words, python=python) if ranks else [python, *words]
    done = processes.run(command, 200, processes.environment(**env), tmp_path)
    assert not done.timed_out, done.output
    return done.status, done.output


@pytest.mark.long
@each_mpi
def test_a_failing_test(python, tmp_path):
    """One report; each rank's failure, and the later tests are run, with a communicator anew."""
    suite = """
def test_fails(comm):
    print("printed on", comm.rank)
    comm.barrier()
    assert comm.rank != 1, "not on this one"
    comm.barrier()
def test_later(comm):
    assert comm.allreduce(1) == comm.size
"""
    status, output = run(tmp_path, suite, python=python, ranks=3)
    assert status and output.count("test session starts") == 1
    assert "failed on rank 1: AssertionError: not on this one" in output
    assert "printed on 1" in output
    assert "1 failed, 2 passed" in output


@pytest.mark.long
def test_a_hanging_test(tmp_path):
    """Stuck in Python: pytest-timeout ends the test; stuck inside MPI: the ranks show stacks."""
    stuck = "def test_stuck():\n    while RANK: time.sleep(0.05)\n"
    head = "from mpi4py import MPI\nRANK = MPI.COMM_WORLD.rank\n"
    status, output = run(tmp_path, head + stuck + "def test_later(): pass\n", limit=4)
    assert status == 1 and "failed on rank 1: Failed: Timeout" in output
    assert "1 failed, 2 passed" in output
    inside = "def test_inside():\n    if RANK: MPI.COMM_WORLD.recv(source=0, tag=99)\n"
    status, output = run(tmp_path, head + inside, limit=4)
    assert status and "rank 1 did not come within 8 s to the end of" in output
    assert "the stacks of rank 1 " in output and "in test_inside\n" in output


def test_a_dying_test(tmp_path):
    suite = """
def test_dies(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    status, output = run(tmp_path, suite)
    assert status
    assert "rank 0: ended by the launcher in test_suite.py::test_dies" in output


def test_without_an_mpiexec(tmp_path):
    """One process: pytest as ever, with a communicator of one rank."""
    status, output = run(tmp_path, "", ranks=0)
    assert status == 0 and "1 passed" in output


@pytest.mark.long
def test_without_other_plugins(tmp_path):
    """Neither pytest-timeout nor pytest-mpi is needed."""
    suite = "def test_fails(comm):\n    assert comm.rank\n"
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    status, output = run(tmp_path, suite, **alone)
    assert status == 1 and "failed on rank 0: assert 0" in output
    hangs = "def test_hangs(comm):\n    while comm.rank: time.sleep(0.05)\n"
    status, output = run(tmp_path, hangs, "--rank-timeout=3", **alone)
    assert status and "rank 1 did not come within 7 s to the end of" in output
