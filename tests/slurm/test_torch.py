"""torch.distributed with the backend "mpidist" over two nodes: its tests, run there."""

import re

import pytest

from tests.support.slurm_cluster import LONG, user_environment
from tests.support.training_kits import NEEDS_TORCH, torch

# Closed forms of all collectives; models in parallel, equal to gloo's run and to one process.
NAMES = "process_group", "collectives", "memory", "operation_queue", "messages", "work", "models"
FILES = [f"tests/torch/test_{name}_mpi.py" for name in NAMES]
SOME = ["-k", "float32 or int64 or gather or reduce_scatter or all_to_all or lstm or mixture"]
LEAST = 10
if LONG:
    SOME, LEAST = [], 90


@pytest.mark.timeout(400)
@pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
def test_two_nodes(cluster, folder):
    """Two ranks on each node: memory within it, messages to the other one."""
    job = cluster.submit(
        "--nodes=2",
        "--ntasks-per-node=2",
        "--no-requeue",
        "slurm/test.sbatch",
        *FILES,
        *SOME,
        folder=folder,
        **user_environment("this"),
    )
    done = cluster.wait(job, 300 if LONG else 150)
    assert done.completed, f"{done.state} {done.exit_code}\n{done.output}"
    passed = re.search(r"(\d+) passed", done.output)
    assert passed and int(passed[1]) >= LEAST, done.output
    assert "--ntasks=4 --ntasks-per-node=2" in done.output and "failed" not in done.output
