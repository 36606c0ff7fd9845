"""Every script of slurm/, submitted to a real slurmctld, under each MPI."""

import json
import re
from pathlib import Path

import pytest

from mpidist.schedule.contract import COLLECTIVES
from tests.support.jobs import PYTHONS
from tests.support.slurm_cluster import LONG, user_environment

SLURM = Path(__file__).resolve().parents[2] / "slurm"
ONE_EACH = ("--nodes=2", "--ntasks-per-node=1")
TESTS = ["tests/communicator/test_split_mpi.py", "tests/engine/test_work_mpi.py", "-q"]
QUICK = ["barrier", "--bytes", "8", "--force"]
# Options of sbatch, the script, its arguments, and what it must print.  Two cores serve all nodes:
# one rank on each is enough to cross the link.
SCRIPTS = {
    "test": (ONE_EACH, TESTS, r"[1-9]\d* passed"),
    "bench": (("--nodes=3", "--ntasks-per-node=1"), [], r"alltoall"),
    "tune": (ONE_EACH, QUICK, r"1 size measured"),
    "train_ddp": (ONE_EACH, [], r"2 ranks: accuracy 9\d\.\d%"),
    "train_pipeline": (ONE_EACH, [], r"2 ranks, 1 x 2 stages: .* True"),
    "train_gpu": ((*ONE_EACH, "--gres=gpu:1"), [], r"2 ranks on the host: .* right: True"),
    "train_requeue": (ONE_EACH, ["2"], r"steps, parameters [0-9a-f]{64}"),
    "array_sweep": (("--array=0-1",), ["--epochs", "2"], r"learning rate 0\.\d+: .* right"),
}
ENVIRONMENT = {"SIZES": "8", "BUDGET": "0.05"}


def names():
    """The scripts that there are."""
    return sorted(path.stem for path in SLURM.glob("*.sbatch"))


def test_no_script_is_left_out():
    assert set(names()) == set(SCRIPTS)


def test_scripts_end_in_the_launch_line():
    for name in names():
        lines = (SLURM / f"{name}.sbatch").read_text().replace("\\\n", " ").splitlines()
        assert lines[-1].startswith("exec mpidist run "), name
        assert len(lines) <= 22 and any(line.startswith("# Edit: ") for line in lines[:6]), name
        assert any("repository's root" in line for line in lines[:6]), name
        assert max(map(len, lines[:6])) <= 100, name


# In the short run each library has one, on two nodes; tests/slurm/test_requeue.py has another.
SHORT = {"this": "train_gpu", "mpich": "train_ddp"}
CHOSEN = {"some": [(mpi, SHORT[mpi]) for mpi in PYTHONS]}
if LONG:
    CHOSEN = {mpi: [(mpi, path.stem) for path in SLURM.glob("*.sbatch")] for mpi in PYTHONS}


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN.keys())
def test_scripts_complete(cluster, folder, chosen):
    """All are submitted at once, and share three nodes as SLURM sees fit; a few are not."""
    jobs = {}
    for mpi, name in chosen:
        jobs[name] = submit(cluster, name, user_environment(mpi), folder)
        if not LONG:
            cluster.wait(jobs[name], 60)
    wrong = [text for name, job in jobs.items() if (text := complaint(cluster, name, job))]
    assert not wrong, "\n\n".join(wrong)
    if "bench" in jobs:
        about = json.loads(next(folder.glob("scaling-*.json")).read_text())
        assert about["header"]["nodes"] == {"1": 1, "2": 2, "3": 3}
        assert {row["ranks"] for row in about["rows"]} == {1, 2, 3}
        assert {row["work"] for row in about["rows"]} == set(COLLECTIVES)
        assert next(folder.glob("scaling-*.svg")).read_text().count("<svg") == 1
    if "tune" in jobs:
        table = json.loads((folder / "tuning-test.json").read_text())
        assert [entry["collective"] for entry in table["entries"]] == ["barrier"]


def submit(cluster, name, user, folder, unchanged=False):
    """Submit a script as SCRIPTS has it, or as it is; give the job's number."""
    options, arguments, _ = SCRIPTS[name]
    if unchanged and name != "array_sweep":  # of which two jobs are enough
        options = ()
    script = f"slurm/{name}.sbatch"
    return cluster.submit(
        *options, "--no-requeue", script, *arguments, folder=folder, **ENVIRONMENT, **user
    )


def complaint(cluster, name, job, unchanged=False):
    """Say what is wrong with a job, or nothing."""
    numbers = [f"{job}_0", f"{job}_1"] if name == "array_sweep" else [job]
    for number in numbers:
        done = cluster.wait(number, 240 if LONG else 60)
        expected = SCRIPTS[name][2]
        if name == "train_gpu":
            gpus = "no" if unchanged else "1"
            assert f"SLURM grants {gpus} GPU(s)" in done.output, done.output
            expected = expected.replace("2 ranks", "1 ranks") if unchanged else expected
        said = re.search(expected, done.output)
        if name == "test":  # of symmetric memory, which is one node's
            assert ("needs all ranks on one node" in done.output) != unchanged, done.output
        if not done.completed or not said:
            return f"{name}: {done.state} {done.exit_code}\n{done.output}"
    return ""


@pytest.mark.skipif(not LONG, reason="takes a minute or two: make test-slurm")
def test_unchanged_on_one_node(cluster, mpi, user, folder):
    """Every script as it is: two ranks of one node, which share its memory."""
    jobs = {name: submit(cluster, name, user, folder, unchanged=True) for name in names()}
    wrong = [text for name, job in jobs.items() if (text := complaint(cluster, name, job, True))]
    assert not wrong, "\n\n".join(wrong)
    assert all(cluster.show(job)["NumNodes"] == "1" for job in jobs.values())
