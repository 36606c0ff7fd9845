"""Jobs whose ranks wait for each other until something happens to one of them."""

from __future__ import annotations

import time

ONE_TASK_A_CORE = ("--nodes=2", "--ntasks-per-node=2", "--no-requeue")
DEADLINE = 40.0  # seconds in which a job begins, and in which one that fails ends
RUNS = {"srun": "mpidist run", "mpiexec": "mpidist run --launcher mpiexec"}
WAIT = """import os, sys
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


def submit(cluster, user, folder, how, launcher):
    """Submit such a job; give its number, and the files that its ranks make once they run."""
    (folder / "wait.py").write_text(WAIT)
    mark, script = folder / f"{how}.{launcher}", folder / f"{how}.{launcher}.sh"
    script.write_text(f"#!/bin/bash\nexec {RUNS[launcher]} {folder}/wait.py {how} {mark}\n")
    job = cluster.submit(*ONE_TASK_A_CORE, str(script), **user)
    return job, [mark.with_name(f"{mark.name}.{rank}") for rank in range(4)]


def all_begun(cluster, job, marks):
    """Wait until every rank of a job has begun."""
    deadline = time.monotonic() + DEADLINE
    while not all(mark.exists() for mark in marks):
        said = cluster.show(job)
        state = said.get("JobState")
        assert time.monotonic() < deadline and state in ("PENDING", "RUNNING"), (
            f"{state}\n{cluster.output(said)}"
        )
        time.sleep(0.1)  # a file of another node: nothing to wait on
