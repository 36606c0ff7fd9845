"""A job that is interrupted, put back into the queue and goes on, ends with the same bits."""

import re
import time
from datetime import datetime, timedelta

import pytest

from tests.support.jobs import PYTHONS
from tests.support.slurm_cluster import LONG, user_environment

SCRIPT = "slurm/train_requeue.sbatch"
# Seconds of training, so that a signal sent after the first checkpoint comes before its end.
EPOCHS = {"one": "300", "two": "40"}
# Tasks on one node as on two: in the short run both jobs of the array have one for themselves.
LAYOUTS = {"one": ("--nodes=1", "--ntasks-per-node=2"), "two": ("--nodes=2", "--ntasks=2")}
CASES = [(mpi, nodes) for mpi in PYTHONS for nodes in LAYOUTS] if LONG else [("this", "one")]


def parameters(output):
    found = re.search(r"(\d+) steps, parameters ([0-9a-f]{64})", output)
    assert found, output
    return found.groups()


@pytest.mark.parametrize(("mpi", "nodes"), CASES)
def test_bits_of_an_interrupted_training(cluster, mpi, nodes, folder):
    """Two jobs of an array train alike; the last, whose number is the array's, is interrupted.

    USR1 comes as by ``--signal=B:USR1@60``: to the batch script alone, which hands it on.
    """
    # As in a job from which this one is submitted, and which was requeued as often as may be.
    inherited = {"SLURM_RESTART_COUNT": "20", **user_environment(mpi)}
    training = (*LAYOUTS[nodes], SCRIPT, EPOCHS[nodes])
    array = cluster.submit("--array=0-1", *training, folder=folder, **inherited)
    whole, job = f"{array}_0", f"{array}_1"
    until(cluster, job, lambda said, text: "saved step" in text)
    signalled = cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert signalled.status == 0, signalled.output
    until(cluster, job, lambda said, text: said.get("Restarts") == "1")
    start_now(cluster, job)
    done, reference = cluster.wait(job, 240), cluster.wait(whole, 240)
    assert done.completed, f"{done.state} {done.exit_code}\n{done.output}"
    assert reference.completed and cluster.show(whole)["Restarts"] == "0", reference.output
    assert f"exit code 75: requeuing job {job}, 1 of 20" in done.output
    begun = [int(step) for step in re.findall(r"from step (\d+) on", done.output)]
    saved = [int(step) for step in re.findall(r"saved step (\d+)", done.output)]
    assert len(begun) == 2 and begun[0] == 0 and begun[1] in saved, done.output
    assert 0 < begun[1] < int(parameters(reference.output)[0])
    assert parameters(done.output) == parameters(reference.output)


@pytest.mark.skipif(not LONG, reason="takes a minute or two: make test-slurm")
@pytest.mark.parametrize("mpi", PYTHONS)
def test_bits_of_a_killed_training(cluster, mpi, folder):
    """No signal comes before: the next job goes on from the last checkpoint that there is."""
    options = {"folder": folder, **user_environment(mpi), "CHECKPOINTS": "kept"}
    training = (*LAYOUTS["two"], SCRIPT, EPOCHS["two"])
    job = cluster.submit(*training, **options)
    until(cluster, job, lambda said, text: "epoch 1 of" in text)
    assert cluster.run("scancel", "--full", "--signal=KILL", job).status == 0
    assert not cluster.wait(job, 60).completed
    second = cluster.wait(cluster.submit(*training, **options), 240)
    options["CHECKPOINTS"] = "other"
    whole = cluster.wait(cluster.submit(*training, **options), 240)
    assert second.completed and whole.completed, second.output + whole.output
    assert int(re.search(r"from step (\d+) on", second.output)[1]) > 0
    assert parameters(second.output) == parameters(whole.output)


@pytest.mark.skipif(not LONG, reason="takes a minute or two: make test-slurm")
def test_the_signal_before_the_time_limit(cluster, folder):
    """SLURM's own timer, which looks twice a minute: nobody here sends the signal."""
    jobs = {}
    for mpi in PYTHONS:  # at the same time
        options = (*LAYOUTS["one"], "--time=1", "--signal=B:USR1@50", SCRIPT, "100000")
        environment = {**user_environment(mpi), "CHECKPOINTS": f"timed-{mpi}"}
        jobs[mpi] = cluster.submit(*options, folder=folder, **environment)
    for job in jobs.values():
        until(cluster, job, lambda said, text: said.get("Restarts") == "1")
        start_now(cluster, job)
        until(cluster, job, lambda said, text: text.count(" on\n") == 2)
        assert cluster.run("scancel", job).status == 0
        done = cluster.wait(job)
        assert f"exit code 75: requeuing job {job}, 1 of 20" in done.output, done.output
        saved = re.findall(r"saved step (\d+)\n", done.output.partition("requeuing job")[0])
        begun = re.findall(r"from step (\d+) on\n", done.output)
        assert begun == ["0", saved[-1]] and done.state == "CANCELLED", done.output


def start_now(cluster, job):
    """It would wait for two minutes.

    SLURM sets that time when the job has ended on all nodes, perhaps after we have changed it.  For
    two seconds more a step of the first run may hold its socket, which the same step of the second
    run then cannot bind.
    """

    def started(said, text):
        if said.get("JobState") == "PENDING" and said["StartTime"] != "Unknown":
            begin = datetime.fromisoformat(said["StartTime"])
            if begin - datetime.now() > timedelta(seconds=8):
                cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+6")
        return said.get("JobState") in ("RUNNING", "COMPLETED")

    until(cluster, job, started)


def until(cluster, job, holds, limit=120.0):
    deadline = time.monotonic() + limit
    while True:
        said = cluster.show(job)
        text = cluster.output(said)
        if holds(said, text):
            return
        assert time.monotonic() < deadline, f"{said.get('JobState')}\n{text}"
        time.sleep(0.1)  # slurmctld has no way to wait for this
