"""A job that is interrupted, put back into the queue and goes on, ends with the same bits."""

import re
import time

import pytest
from jobs import PYTHONS
from slurm_cluster import LONG

EPOCHS = "4"
OPTIONS = ("--nodes=2", "--ntasks-per-node=1")


def parameters(output):
    found = re.search(r"(\d+) steps, parameters ([0-9a-f]{64})", output)
    assert found, output
    return found.groups()


@pytest.mark.skipif(not LONG, reason="takes a minute or two: make test-slurm")
@pytest.mark.parametrize("mpi", PYTHONS)
def test_bits_of_an_interrupted_training(cluster, mpi, user, folder):
    """USR1 comes as by ``--signal=B:USR1@60``: to the batch script alone, which hands it on."""
    script = ("slurm/train_requeue.sbatch", EPOCHS)
    once = cluster.submit(*OPTIONS, *script, folder=folder, **user)
    whole = cluster.wait(once, 240)
    assert whole.completed, whole.output
    job = cluster.submit(*OPTIONS, *script, folder=folder, **user)
    until(cluster, job, lambda said, text: "epoch 1 of" in text)
    signalled = cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert signalled.status == 0, signalled.output
    until(cluster, job, lambda said, text: said.get("Restarts") == "1")
    # It would wait for two minutes; in the second of its end the nodes still refuse it.
    begun = cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    assert begun.status == 0, begun.output
    done = cluster.wait(job, 240)
    assert done.completed, f"{done.state} {done.exit_code}\n{done.output}"
    assert "exit code 75: requeuing job" in done.output
    saved = re.search(r"saved step (\d+)", done.output)
    assert saved and f"from step {saved[1]} on" in done.output, done.output
    assert 0 < int(saved[1]) < int(parameters(whole.output)[0])
    assert parameters(done.output) == parameters(whole.output)


def until(cluster, job, holds, limit=120.0):
    deadline = time.monotonic() + limit
    while True:
        said = cluster.show(job)
        text = cluster.output(said)
        if holds(said, text):
            return
        assert time.monotonic() < deadline, f"{said.get('JobState')}\n{text}"
        time.sleep(0.1)  # slurmctld has no way to wait for this
