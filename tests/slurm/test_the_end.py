"""A node loses its power.  The last of the tests here: the node is gone afterwards."""

import pytest

from tests.support.jobs import PYTHONS
from tests.support.slurm_cluster import DEADLINE, LONG, RUNS, all_begun, submit

# Open MPI's mpirun says 0 then.
CASES = [(mpi, how) for mpi in PYTHONS for how in RUNS] if LONG else [("this", "mpiexec")]


@pytest.mark.parametrize(("mpi", "launcher"), CASES)
def test_a_crashed_node(cluster, mpi, user, tmp_path, launcher):
    job, marks = submit(cluster, user, tmp_path, "crashed", launcher)
    all_begun(cluster, job, marks)
    # Not the node of the batch script, which ends with it.
    said = cluster.show(job)
    names = cluster.run("scontrol", "show", "hostnames", said["NodeList"]).output.split()
    node = next(name for name in names if name != said["BatchHost"])
    # The monitors first: they would tell of their ranks' ends, as they cannot without power.
    cluster.crash(node, first="rank_process.py")
    try:
        done = cluster.wait(job, DEADLINE, completing=True)
        assert done.exit_code != "0:0", f"{done.state}\n{done.output}"
        assert f"on {node} is lost" in done.output or "Node failure" in done.output, done.output
    finally:
        if LONG:
            cluster.boot(node)
            everyone = len(cluster.names)
            cluster._until(lambda: cluster._idle() == everyone, "every node is idle", 60)
