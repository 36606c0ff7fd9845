"""Jobs that do not end well: none hangs, none ends with exit code 0."""

import re

import pytest

from tests.support.slurm_cluster import DEADLINE, LONG, ONE_TASK_A_CORE, RUNS, all_begun, submit

HOW = ["killed", "leaves", "raises"] if LONG else ["killed"]


@pytest.mark.parametrize("how", HOW)
def test_failing_rank_ends_the_job(cluster, mpi, user, tmp_path, how):
    jobs = {launcher: submit(cluster, user, tmp_path, how, launcher)[0] for launcher in RUNS}
    for launcher, job in jobs.items():
        done = cluster.wait(job, DEADLINE)
        assert done.state == "FAILED", f"{launcher}: {done.state} {done.exit_code}\n{done.output}"
        assert done.exit_code != "0:0", done.output
        assert "mpidist run: rank " in done.output, done.output
        if how == "killed":  # which node hears of it first differs
            assert re.search(
                r"no record here; on n\d, mpidist flight [\d-]+\w{4} there", done.output
            )
        if how == "leaves":
            # Open MPI ends a rank whose peer is gone by 14, perhaps before the peer's end is told.
            assert done.exit_code in ("5:0", "14:0"), done.output
            assert re.search(
                r"mpidist run: (and )?rank 3 on n\d ended with exit code 5", done.output
            )


STUCK = """import os, time
from mpidist.communicator.launcher_notes import send_note
send_note(mpi="starting")
if "MPI_LOCALNRANKS" not in os.environ:  # not by MPICH's own launcher
    time.sleep(100)
send_note(mpi="started")
print("through", flush=True)
"""


@pytest.mark.skipif(not LONG, reason="takes a minute or two: make test-slurm")
def test_mpi_that_does_not_start(cluster, mpi, user, tmp_path):
    """As MPICH under pmi2 now and then: it is started once more, by its own launcher."""
    (tmp_path / "stuck.py").write_text(STUCK)
    script = tmp_path / "stuck.sh"
    script.write_text(f"#!/bin/bash\nexec mpidist run --start-timeout 2 {tmp_path}/stuck.py\n")
    done = cluster.wait(cluster.submit(*ONE_TASK_A_CORE, str(script), **user), DEADLINE)
    assert "4 of 4 ranks (0, 1, 2, 3) have been in MPI_Init for 2 s" in done.output, done.output
    assert ("mpidist run: once more: " in done.output) == (mpi == "mpich"), done.output
    assert done.completed == (mpi == "mpich"), done.output
    said = done.output.rpartition("once more: ")[2]  # behind "no rank came through MPI_Init"
    assert said.count("through") == 4 * (mpi == "mpich"), done.output


def test_scancel(cluster, mpi, user, tmp_path):
    job, marks = submit(cluster, user, tmp_path, "cancelled", "srun")
    all_begun(cluster, job, marks)
    assert cluster.run("scancel", job).status == 0
    done = cluster.wait(job, DEADLINE)
    assert done.state == "CANCELLED", f"{done.state}\n{done.output}"
    assert done.exit_code != "0:0"
