"""mpidist run --max-restarts on several emulated nodes, of which one is lost."""

import re
import threading
import time
from pathlib import Path

import pytest

from mpidist.launcher.restarts import OF_NODES
from tests.support import processes
from tests.support.elastic_chaos import TRAINING, Watched
from tests.support.jobs import ROOT, each_mpi
from tests.support.minicluster import Cluster, running

LIMIT = 150
NODE = "/dev/shm"


@pytest.fixture
def cluster():
    with running(Cluster(nodes=2)) as started:
        yield started


class Job:
    """A training of 4 ranks on the nodes n1 and n2, started on the head."""

    def __init__(self, cluster, folder, python, wrapper, steps, *words):
        self.cluster, self.folder = cluster, folder
        (folder / "of_open_mpi").write_text("n1 slots=2\nn2 slots=2\n")
        (folder / "of_mpich").write_text("n1:2\nn2:2\n")
        (folder / "said").mkdir()
        self.watched = Watched(str(folder / "said"))
        environ = {
            "PRTE_MCA_prte_default_hostfile": str(folder / "of_open_mpi"),
            "PRTE_MCA_rmaps_default_mapping_policy": "ppr:2:node",
            "HYDRA_HOST_FILE": str(folder / "of_mpich"),
            "ELASTIC_TEST": str(folder / "said"),
            "PYTHONPATH": str(ROOT),
            "MPIDIST_TIMEOUT": "60",
        }
        command = [python, "-m", "mpidist", "run", "-q", "-n", "4", "--max-restarts", "3", *words]
        command = cluster.inside("head", *command, str(TRAINING), wrapper, str(steps))
        environ = {**cluster.environment(), **environ}

        def run():
            self.finished = processes.run(command, LIMIT, environ, cwd=folder)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def reaches(self, step):
        """Wait until a rank has come to a step."""
        until = time.monotonic() + 60
        while self.watched.step() < step:
            assert self.thread.is_alive() and time.monotonic() < until, self.output
            time.sleep(0.01)

    @property
    def output(self):
        return self.finished.output if hasattr(self, "finished") else "it runs"

    def wait(self):
        self.thread.join(LIMIT + 20)
        return self.finished

    def said(self, text):
        """Return the lines of mpidist run with a text."""
        lines = [line for line in self.output.splitlines() if text in line]
        return [line.removeprefix("mpidist run: ") for line in lines]

    def folders(self):
        """Return the folders with records that there are on all nodes."""
        pids = self.cluster.pids.values()
        return [f for pid in pids for f in Path(f"/proc/{pid}/root{NODE}").glob(f"{OF_NODES}*")]


@each_mpi
def test_lost_node_is_left_out_and_the_others_go_on_from_memory(cluster, tmp_path, python):
    job = Job(cluster, tmp_path, python, "nn", 4000)
    job.reaches(20)
    before = job.watched.step()
    assert len(job.folders()) == 3  # two of nodes, and that of mpidist run
    cluster.cut_off("n2")
    cluster.crash("n2", first="rank_process.py")
    job.reaches(before + 40)
    done = job.wait()
    assert done.status == 0, done.output
    (line,) = job.said("left out")
    found = re.fullmatch(
        r"node n2 is left out; start 2 of 4 on 2 ranks, from step (\d+) in memory", line
    )
    assert found and int(found[1]) >= before, done.output
    ends = job.watched.done()
    assert len(ends) == 2 and len(set(ends)) == 1 and "of 2 ranks at step 4000" in ends[0]
    assert not [folder for folder in job.folders() if "n2" not in str(folder)][1:], job.folders()
