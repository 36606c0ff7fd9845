"""A node loses its power.  The last of the tests here: the node is gone afterwards."""

import re
import time

import pytest

from tests.support.elastic_chaos import TRAINING, Watched
from tests.support.jobs import PYTHONS
from tests.support.slurm_cluster import (
    DEADLINE,
    LONG,
    ONE_TASK_A_CORE,
    RUNS,
    all_begun,
    submit,
)

# Open MPI's mpirun says 0 then.
CASES = [(mpi, how) for mpi in PYTHONS for how in RUNS] if LONG else [("this", "mpiexec")]


def node_beside_the_script(cluster, job):
    """Return another node than that of the batch script, which ends with it."""
    said = cluster.show(job)
    names = cluster.run("scontrol", "show", "hostnames", said["NodeList"]).output.split()
    return next(name for name in names if name != said["BatchHost"])


def boot(cluster, node):
    """Let a node be there again."""
    cluster.boot(node)
    everyone = len(cluster.names)
    cluster._until(lambda: cluster._idle() == everyone, "every node is idle", 60)


@pytest.mark.skipif(not LONG, reason="takes a minute or two: make test-slurm")
@pytest.mark.parametrize(("mpi", "launcher"), [(mpi, how) for mpi in PYTHONS for how in RUNS])
def test_training_goes_on_without_a_crashed_node(cluster, mpi, user, tmp_path, launcher):
    """With --no-kill, from memory on the ranks that are left."""
    said = tmp_path / "said"
    said.mkdir()
    script, watched = tmp_path / "elastic.sh", Watched(str(said))
    run = f"{RUNS[launcher]} --max-restarts 3 {TRAINING} nn 3000"
    script.write_text(f"#!/bin/bash\nexec {run}\n")
    words = (*ONE_TASK_A_CORE, "--no-kill", str(script))
    job = cluster.submit(*words, folder=tmp_path, ELASTIC_TEST=str(said), **user)
    until = time.monotonic() + DEADLINE
    while watched.step() < 20:
        assert time.monotonic() < until, cluster.output(cluster.show(job))
        time.sleep(0.05)
    before, node = watched.step(), node_beside_the_script(cluster, job)
    cluster.crash(node, first="rank_process.py")
    try:
        done = cluster.wait(job, 120, completing=True)
        assert done.exit_code == "0:0", f"{done.state}\n{done.output}"
        line = f"node {node} is left out; start 2 of 4 on 2 ranks, from step (\\d+) in memory"
        assert int(re.search(line, done.output)[1]) >= before - 1, done.output
        (end,) = set(watched.done())
        assert end.endswith("of 2 ranks at step 3000") and len(watched.done()) == 2, end
    finally:
        boot(cluster, node)


@pytest.mark.parametrize(("mpi", "launcher"), CASES)
def test_a_crashed_node(cluster, mpi, user, tmp_path, launcher):
    job, marks = submit(cluster, user, tmp_path, "crashed", launcher)
    all_begun(cluster, job, marks)
    node = node_beside_the_script(cluster, job)
    # The monitors first: they would tell of their ranks' ends, as they cannot without power.
    cluster.crash(node, first="rank_process.py")
    try:
        done = cluster.wait(job, DEADLINE, completing=True)
        assert done.exit_code != "0:0", f"{done.state}\n{done.output}"
        assert f"on {node} is lost" in done.output or "Node failure" in done.output, done.output
    finally:
        if LONG:
            boot(cluster, node)
