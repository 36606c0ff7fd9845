"""Atomic changes of the folder: old checkpoints, and what a kill leaves."""

import signal
import sys
from pathlib import Path

import pytest

from mpidist import Checkpoint, run_simulated
from tests.support.processes import environment, run

JOB = Path(__file__).with_name("killed_job.py")


@pytest.mark.ranks(1, 3, 4)
def test_old_checkpoints_are_removed(comm, folder):
    checkpoint = Checkpoint(folder, comm, keep=2)
    for step in (1, 5, 3, 9, 9):
        checkpoint.save(step, value=step)
    comm.barrier()
    assert checkpoint.steps() == [5, 9]
    assert checkpoint.load()["value"] == 9
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005.0", "step-00000009.1"]


@pytest.mark.long
def test_killed_at_any_moment_leaves_whole_checkpoints(tmp_path):
    """Every call to the file system is the last one once; what was complete is whole."""
    moment, killed = 0, True
    while killed:
        folder = tmp_path / str(moment)
        done = run(
            [sys.executable, str(JOB), str(folder), str(moment)],
            60.0,
            environment(PYTHONPATH=str(JOB.parents[2])),
        )
        killed = done.status == -signal.SIGKILL
        assert killed or done.status == 0, done.output
        complete = [int(line.split()[1]) for line in done.output.splitlines() if "saved" in line]

        def check(comm, folder=folder, complete=complete):
            found = Checkpoint(folder, comm).load()
            step = 0 if found is None else found["step"]
            assert step in (max(complete, default=0), max(complete, default=0) + 1)
            assert found is None or (found["data"] == step).all()
            Checkpoint(folder, comm).save(step + 1, data=found)  # and it goes on

        run_simulated(2, check)
        moment += 1
    assert moment > 12
