"""Run the launcher over a throw-away suite with faults put in."""

import shutil
import sys
from pathlib import Path

from tests.support import processes

TESTS = Path(__file__).resolve().parents[1]
SETTINGS = """
[pytest]
pythonpath = {root}
addopts = -ra --strict-markers --import-mode=importlib
markers =
    long
    docs
faulthandler_timeout = {stacks}
timeout = {limit}
"""
# Of a test: where none is to hang, longer than one can take.
HANGS, NEVER = 4, 100
HEAD = """
import os, signal, time
import pytest
from mpi4py import MPI
world = MPI.COMM_WORLD
"""


def command(
    folder: Path, text: str, names: str = "openmpi-2", *options: str, limit: int = NEVER
) -> list[str]:
    """Write a suite of one file and return the command that launches it; serial: without MPI.

    `limit` is that of each test, in seconds; stacks are shown after a quarter of it.
    """
    settings = SETTINGS.format(root=TESTS.parent, stacks=limit // 4, limit=limit)
    (folder / "pytest.ini").write_text(settings)
    (folder / "test_suite.py").write_text(HEAD * (names != "serial") + text)
    shutil.copy(TESTS / "conftest.py", folder)
    own = ["--python", sys.executable, "--results", str(folder / "results"), *options]
    own += ["--path", str(folder / "test_suite.py")]
    return [sys.executable, str(TESTS / "launch.py"), *names.split(), *own, "--", "--rank-grace=4"]


def launch(
    folder: Path, text: str, names: str = "openmpi-2", *options: str, limit: int = NEVER
) -> tuple[int, str]:
    """Launch the suite and return the status and all that was printed."""
    finished = processes.run(command(folder, text, names, *options, limit=limit), limit=200)
    assert finished.status is not None, finished.output
    return finished.status, finished.output


def closing(output: str) -> str:
    """Return the last line."""
    return output.splitlines()[-1]
