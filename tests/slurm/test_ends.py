"""Jobs that do not end well: none hangs, none ends with exit code 0."""

import re

import pytest
from slurm_cluster import LONG
from slurm_jobs import DEADLINE, RUNS, all_begun, submit

HOW = ["killed", "leaves", "raises"] if LONG else ["killed"]


@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_ends_badly_ends_the_job(cluster, mpi, user, tmp_path, how):
    jobs = {launcher: submit(cluster, user, tmp_path, how, launcher)[0] for launcher in RUNS}
    for launcher, job in jobs.items():
        done = cluster.wait(job, DEADLINE)
        assert done.state == "FAILED", f"{launcher}: {done.state} {done.exit_code}\n{done.output}"
        assert done.exit_code != "0:0", done.output
        assert "mpidist run: rank " in done.output, done.output
        if how == "leaves":
            # Open MPI ends a rank whose peer is gone by 14, perhaps before the peer's end is told.
            assert done.exit_code in ("5:0", "14:0"), done.output
            assert re.search(
                r"mpidist run: (and )?rank 3 on n\d ended with exit code 5", done.output
            )


def test_scancel(cluster, mpi, user, tmp_path):
    job, marks = submit(cluster, user, tmp_path, "cancelled", "srun")
    all_begun(cluster, job, marks)
    assert cluster.run("scancel", job).status == 0
    done = cluster.wait(job, DEADLINE)
    assert done.state == "CANCELLED", f"{done.state}\n{done.output}"
    assert done.exit_code != "0:0"
