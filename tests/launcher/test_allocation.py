"""The allocation of a job, from the environment and from SLURM's answers."""

import pytest

from mpidist.engine.calibration import pairs_of
from mpidist.errors import LaunchError
from mpidist.launcher import allocation, command_line, slurm
from mpidist.launcher.allocation import SlurmAllocation, per_node
from mpidist.launcher.job import own_environment
from tests.support.launcher_kits import JOB, PTY


def test_per_node():
    assert per_node("2(x3),1") == (2, 2, 2, 1)
    assert per_node("") == () == per_node("many")


def test_find_outside_of_an_allocation():
    assert SlurmAllocation.find({}) is None


@pytest.mark.parametrize(
    ("node", "threads"),
    [
        ("Sockets=1 Boards=1 CoresPerSocket=2 ThreadsPerCore=2 CPUTot=4", 2),
        ("Sockets=1 Boards=1 CoresPerSocket=2 ThreadsPerCore=2 CPUTot=2", 1),
        ("slurm_load_node error: Unable to contact slurm controller", 1),
    ],
)
def test_threads_per_core(monkeypatch, node, threads):
    monkeypatch.setattr(allocation, "_scontrol", lambda *_: node)
    assert allocation.threads_per_core(SlurmAllocation.find(JOB)) == threads
    assert allocation.kill_wait() == allocation.KILL_WAIT


def test_requeue_has_a_limit(monkeypatch):
    """A job of an array is queued again alone, and not for ever."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "4"}
    found, asked = SlurmAllocation.find({**JOB, **array}), []

    def ask(command, seconds):
        asked.append(command)
        raise LaunchError("no SLURM here")

    monkeypatch.setattr(allocation, "run_for_output", ask)
    monkeypatch.setattr(allocation, "_scontrol", lambda *_: "")
    with pytest.raises(LaunchError, match=r"requeued 4 times already: the limit is 4 "):
        allocation.requeue(found, 4)
    with pytest.raises(LaunchError, match="no SLURM here"):
        allocation.requeue(found, 5)
    assert asked == [["scontrol", "requeue", "7_3"]]
    # SLURM knows better than a variable that came from the job in which this one was submitted.
    monkeypatch.setattr(allocation, "_scontrol", lambda *_: "JobId=8 Requeue=1 Restarts=0")
    with pytest.raises(LaunchError, match="no SLURM here"):
        allocation.requeue(found, 1)
    array["SLURM_ARRAY_JOB_ID"] = "5"  # its other jobs have numbers of their own, and so has a job
    assert SlurmAllocation.find({**JOB, **array}).job == "7"  # that was submitted from one of them


@pytest.mark.parametrize(
    ("said", "tasks"),
    [
        ("NumTasks=4 CPUs/Task=1 NtasksPerN:B:S:C=2:0:*:*", (2, 2)),
        ("NumTasks=3 CPUs/Task=1 NtasksPerN:B:S:C=0:0:*:*", (2, 1)),
        ("NumTasks=7 CPUs/Task=1 NtasksPerN:B:S:C=0:0:*:*", (4, 3)),
        ("slurm_load_jobs error: Unable to contact slurm controller", (5, 5)),
    ],
)
def test_whole_job_in_a_shell_of_one_task(monkeypatch, said, tasks):
    """``srun -n1 --pty bash`` has its own number of tasks in the environment."""
    monkeypatch.setattr(allocation, "_scontrol", lambda *_: f"JobId=7 {said}")
    own = {"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "5"}
    environ = {**JOB, **PTY, **own, "SLURM_JOB_CPUS_PER_NODE": "2,1"}
    found = SlurmAllocation.find(environ)
    assert found.tasks == (1,) and allocation.whole_job(found, environ).tasks == tasks
    assert allocation.whole_job(found, JOB) == found
    monkeypatch.setattr(command_line, "threads_per_core", lambda _: 1)
    monkeypatch.setattr(slurm, "find_launcher", lambda _: "mpiexec")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    launch = command_line.slurm_launch(
        "MPICH", None, allocation.whole_job(found, environ), None, None
    )
    assert launch.ranks == sum(tasks)
    assert launch.settings["SLURM_TASKS_PER_NODE"] == ",".join(map(str, tasks))
    assert "SLURM_DISTRIBUTION" not in own_environment({**environ, "SLURM_DISTRIBUTION": "cyclic"})


def test_pairs_of_links():
    assert pairs_of(((0, 1), (2, 3))) == [(0, 1), (2, 3), (0, 2)]
    assert len(pairs_of(tuple((k,) for k in range(20)))) == 20
