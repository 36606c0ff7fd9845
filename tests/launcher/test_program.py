"""What a user types for a program, and what is started."""

import sys

import pytest

from mpidist.launcher.program import RANK_PROGRAM, Program


@pytest.mark.parametrize(
    ("given", "by_hand", "reporting"),
    [
        (["-m", "mpi4py", "a", "-m"], ["-m", "mpi4py", "a", "-m"], [RANK_PROGRAM, "a", "-m"]),
        (["-c", "1"], ["-m", "mpi4py", "-c", "1"], [RANK_PROGRAM, "-c", "1"]),
        (
            ["python", "-u", "-W", "error", "-m", "pkg"],
            ["-u", "-W", "error", "-m", "pkg"],
            ["-u", "-W", "error", RANK_PROGRAM, "--no-abort", "-m", "pkg"],
        ),
        (
            ["mpidist", "x"],
            ["-m", "mpidist", "x"],
            [RANK_PROGRAM, "--no-abort", "-m", "mpidist", "x"],
        ),
        (["python", "-V"], ["-V"], ["-V"]),
    ],
)
def test_commands_of_python(given, by_hand, reporting):
    program = Program.find(given)
    assert program.by_hand() == [sys.executable, *by_hand]
    assert program.reporting() == [sys.executable, *reporting]


def test_commands_of_another_program():
    program = Program.find(["echo", "-m", "mpi4py"])
    assert program.by_hand() == program.reporting() == ["echo", "-m", "mpi4py"]
    assert not program.difference(False)


def test_commands_of_a_monitored_module():
    """An exception ends the job only where its ranks are monitored."""
    assert not Program.find(["-m", "pkg"]).aborts
    assert Program.find(["-m", "pkg"], modules_too=True).by_hand()[1:3] == ["-m", "mpi4py"]


@pytest.mark.parametrize(
    ("given", "monitored", "said"),
    [
        (["-c", "1"], False, "rank_program.py in place of -m mpi4py"),
        (["-m", "pkg"], True, "rank_program.py before -m, a monitor beside each rank"),
        (["echo"], True, "a monitor beside each rank"),
    ],
)
def test_difference(given, monitored, said):
    assert Program.find(given).difference(monitored) == said
