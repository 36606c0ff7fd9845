"""Jobs that do not end well: none hangs, none ends with exit code 0."""

import time

import pytest

TWO = ("--nodes=2", "--ntasks-per-node=2", "--no-requeue")
DEADLINE = 40.0
WAIT = """import os, sys, time
import numpy as np
import mpidist
comm = mpidist.init()
comm.barrier()
open(sys.argv[2] + f".{comm.rank}", "w").close()
if sys.argv[1] == "killed" and comm.rank == 3:
    os.kill(os.getpid(), 9)
if sys.argv[1] == "leaves" and comm.rank == 3:
    os._exit(5)
if sys.argv[1] == "raises" and comm.rank == 3:
    raise ValueError("boom")
comm.recv(np.zeros(1), (comm.rank + 1) % comm.size)
"""
RUNS = {"srun": "mpidist run", "mpiexec": "mpidist run --launcher mpiexec"}


@pytest.fixture
def start(cluster, user, tmp_path):
    (tmp_path / "wait.py").write_text(WAIT)

    def submit(how, launcher):
        mark = tmp_path / f"{how}.{launcher}"
        script = tmp_path / f"{how}.{launcher}.sh"
        script.write_text(f"#!/bin/bash\nexec {RUNS[launcher]} {tmp_path}/wait.py {how} {mark}\n")
        job = cluster.submit(*TWO, str(script), **user)
        return job, [mark.with_name(f"{mark.name}.{rank}") for rank in range(4)]

    return submit


def all_begun(cluster, job, marks):
    deadline = time.monotonic() + DEADLINE
    while not all(mark.exists() for mark in marks):
        state = cluster.show(job).get("JobState")
        assert time.monotonic() < deadline and state in ("PENDING", "RUNNING"), state
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["killed", "leaves", "raises"])
def test_a_rank_that_ends_badly_ends_the_job(cluster, mpi, start, how):
    jobs = {launcher: start(how, launcher)[0] for launcher in RUNS}
    for launcher, job in jobs.items():
        done = cluster.wait(job, DEADLINE)
        assert done.state == "FAILED", f"{launcher}: {done.state} {done.exit_code}\n{done.output}"
        assert not done.exit_code.startswith("0:0"), done.output
        assert "mpidist run: rank " in done.output, done.output
        if how == "leaves":
            assert done.exit_code == "5:0", done.output


def test_scancel(cluster, mpi, start):
    job, marks = start("cancelled", "srun")
    all_begun(cluster, job, marks)
    assert cluster.run("scancel", job).status == 0
    done = cluster.wait(job, DEADLINE)
    assert done.state == "CANCELLED", f"{done.state}\n{done.output}"
    assert done.exit_code != "0:0"
    idle(cluster)


def test_a_crashed_node(cluster, mpi, start):
    """Under Open MPI's mpirun it would end with 0."""
    job, marks = start("crashed", "mpiexec" if mpi == "this" else "srun")
    all_begun(cluster, job, marks)
    # Not the one of the batch script, which ends with its node.
    nodes = cluster.run("scontrol", "show", "hostnames", cluster.show(job)["NodeList"])
    node = [name for name in nodes.output.split() if name != cluster.show(job)["BatchHost"]][0]
    cluster.crash(node)
    try:
        done = cluster.wait(job, DEADLINE)
        assert done.state in ("FAILED", "NODE_FAIL"), f"{done.state}\n{done.output}"
        assert done.exit_code != "0:0" or done.state == "NODE_FAIL", done.output
        assert f"on {node} is lost" in done.output or "Node failure" in done.output, done.output
    finally:
        cluster.boot(node)
        idle(cluster)


def idle(cluster):
    """The nodes are given back: nothing of a job is left on them."""
    cluster._until(lambda: cluster._idle() == len(cluster.names), "every node is idle", 60)
