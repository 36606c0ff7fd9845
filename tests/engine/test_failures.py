"""Ranks that raise, leave, stop, die or never come: the job ends, in time, and says who it was."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.jobs import HERE, LIMIT, ROOT, each_mpi, job, no_memory_left_behind, said


@each_mpi
def test_a_rank_that_raises(python):
    finished = job(python, 3, "raises")
    assert finished.status
    output = finished.output
    assert "rank 1 of 3 failed; the job ends" in output
    assert "ZeroDivisionError: the rank that is to blame" in output
    assert output.index("Traceback") < output.index("ZeroDivisionError") + 1
    assert output.count("Traceback") == 1


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("what", ["receives", "sends", "collectives"])
def test_operations_that_are_pending_at_the_end(python, what):
    """MPI_Finalize lets their messages come: their memory must still be there."""
    finished = job(python, 2, "leaves_pending", what)
    assert said(finished, "left") == [0, 1], finished.output
    assert finished.status == 0, finished.output


@each_mpi
def test_a_stage_that_raises(python):
    finished = job(python, 3, "stage_raises")
    assert finished.status
    output = finished.output
    assert "rank 1 of 3 failed; the job ends" in output
    assert "ZeroDivisionError: the stage that is to blame" in output
    assert output.count("Traceback") == 1


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("algorithm", ["native", "ring", "linear"])
def test_a_rank_that_never_comes(python, algorithm):
    finished = job(python, 3, "never_comes", algorithm)
    assert said(finished, "named") == [0, 2], finished.output
    assert finished.status


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("algorithm", ["native", "ring", "symmetric", "staged", "single_copy"])
def test_a_rank_that_comes_too_late(python, algorithm):
    finished = job(python, 3, "comes_too_late", algorithm)
    assert said(finished, "all named") == [0, 1, 2], finished.output


@pytest.mark.long
@each_mpi
def test_missing_rank_of_another_node(python):
    """Its place on the board cannot be seen: it is asked, and does not answer."""
    finished = job(python, 3, "never_comes", "ring", MPIDIST_RANKS_PER_NODE="1")
    assert said(finished, "named") == [0, 2], finished.output
    assert finished.status


@pytest.mark.long
@each_mpi
def test_missing_rank_in_split(python):
    finished = job(python, 3, "never_comes_to_a_split")
    assert said(finished, "named") == [0, 2], finished.output
    assert finished.status


@pytest.mark.long
@each_mpi
def test_missing_rank_in_the_background(python):
    finished = job(python, 3, "background_never_comes")
    assert said(finished, "named") == [0, 2], finished.output
    assert finished.status


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("algorithm", ["native", "ring", "symmetric"])
def test_a_rank_that_leaves(python, algorithm):
    finished = job(python, 3, "leaves", algorithm)
    assert said(finished, "named") == [0, 2], finished.output
    assert finished.status


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("symmetric,shared", "native,shared"),
        ("symmetric,shared", "ring,private"),
        ("symmetric,shared", "symmetric,slice"),
        ("auto,private", "auto,shared"),
    ],
)
def test_a_rank_that_goes_another_way(python, first, second):
    finished = job(python, 3, "differ", first, second)
    assert said(finished, "named") == [0, 1, 2], finished.output


@pytest.mark.long
@each_mpi
def test_a_rank_that_is_stopped(python):
    finished = job(python, 3, "stopped")
    assert said(finished, "named") == [0, 2], finished.output
    assert finished.status


@each_mpi
def test_a_rank_that_is_killed(python):
    finished = job(python, 3, "killed")
    assert finished.status and said(finished, "went on") == []


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("who", ["0", "1", "all"])
@pytest.mark.parametrize("when", ["collective", "empty"])
def test_killed_ranks_leave_no_memory(python, who, when):
    with no_memory_left_behind():
        finished = job(python, 3, "killed_in_memory", who, when)
    assert finished.status and said(finished, "went on") == []
    of_mpich = re.findall(r"/dev/shm/mpich_shm_\w+", str(finished.words))
    assert of_mpich or not said(finished, "MPICH")
    assert not [path for path in of_mpich if Path(path).exists()]


@pytest.mark.long
@each_mpi
def test_hang_in_a_native_call(python):
    finished = job(python, 3, "hangs_inside")
    assert finished.status and said(finished, "went on") == []
    words = r"allreduce op=sum 3 x float64 \(collective #\d+, native, which cannot be interrupted\)"
    assert re.search(words, finished.output), finished.output
    assert "all ranks have arrived" in finished.output


@pytest.mark.long
@each_mpi
def test_a_message_that_never_comes(python):
    finished = job(python, 2, "message_never_comes")
    assert said(finished, "named") == [0], finished.output
    assert finished.status


def test_an_operation_that_raises():
    finished = job(sys.executable, 2, "user_operation_raises")
    assert finished.status
    assert "ArithmeticError: inside the operation" in finished.output


@pytest.mark.parametrize(
    ("variable", "cure"),
    [("OMPI_COMM_WORLD_SIZE", "another MPI library"), ("SLURM_STEP_NUM_TASKS", "--mpi=pmix")],
)
def test_singletons_that_were_meant_to_be_many(variable, cure):
    """The launcher says four, MPI sees one: the job must not run four times alone."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = processes.environment(PYTHONPATH=path, **{variable: "4"})
    command = [sys.executable, str(HERE / "failure_jobs.py"), "launch"]
    finished = processes.run(command, LIMIT, env)
    assert finished.status, finished.output
    assert f"LaunchError: {variable}=4 processes were started" in finished.output
    assert cure in finished.output and "mpidist run -n" in finished.output


def test_alone_without_a_launcher():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "failure_jobs.py"), "launch"]
    finished = processes.run(command, LIMIT, processes.environment(PYTHONPATH=path))
    assert finished.status == 0, finished.output
