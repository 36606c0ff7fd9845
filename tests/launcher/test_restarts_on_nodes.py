"""mpidist run --max-restarts on several emulated nodes, of which one is lost."""

import importlib.util
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from mpidist.launcher.restarts import OF_NODES
from tests.support.elastic_chaos import TRAINING, Watched
from tests.support.jobs import ROOT, each_mpi
from tests.support.minicluster import Cluster, kill, running, words_of
from tests.support.processes import run_limited

LIMIT = 150
ENDLESS, MORE = 10**6, 50  # steps of the first start, and of the next
NODE = "/dev/shm"
# What "auto" measures between nodes goes along to the next start.  But another job, whose bits are
# compared, may measure otherwise, and add in another order.
ALIKE = {"MPIDIST_CALIBRATE": "0"}


@pytest.fixture
def cluster():
    with running(Cluster(nodes=2)) as started:
        yield started


class Job:
    """A training of 4 ranks on the nodes n1 and n2, started on the head."""

    def __init__(self, cluster, folder, python, wrapper, steps, *words, **env):
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
            **env,
        }
        command = [python, "-m", "mpidist", "run", "-q", "-n", "4", "--max-restarts", "3", *words]
        command = cluster.inside("head", *command, str(TRAINING), wrapper, str(steps))
        environ = {**cluster.environment(), **environ}

        def run():
            # With whatever zero bytes there are: prterun writes some, mpidist run drops them.
            self.finished = run_limited(command, LIMIT, environ, cwd=folder)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def reaches(self, step):
        """Wait until a rank has come to a step."""
        until = time.monotonic() + LIMIT
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


def lose(cluster, job, reachable=False, forget=False):
    """Let the node n2 lose its power and its memory; return a step that all had committed.

    If `forget`, the other node has lost what it has of n2 before.
    """
    job.reaches(20)
    step = job.watched.step() - 1  # of the rank that is furthest
    if not reachable:
        cluster.cut_off("n2")
    (folder,) = (each for each in job.folders() if int(each.parts[2]) == cluster.pids["n2"])
    for path in (path for each in job.folders() if forget for path in each.glob("*-by-*")):
        path.unlink()
    cluster.crash("n2", first="rank_process.py")
    shutil.rmtree(folder)
    return step


@pytest.mark.long
@each_mpi
def test_lost_node_is_left_out_and_the_others_go_on_from_memory(cluster, tmp_path, python):
    job = Job(cluster, tmp_path, python, "nn", ENDLESS, MORE=str(MORE))
    step = lose(cluster, job)
    done = job.wait()
    assert done.status == 0, done.output
    (line,) = job.said("left out")
    how = r"node n2 is left out; start 2 of 4 on 2 ranks, from step (\d+) in memory"
    found = int(re.fullmatch(how, line)[1])
    assert found >= step, done.output
    ends, last = job.watched.done(), found + 1 + MORE
    assert len(ends) == 2 and len(set(ends)) == 1 and f"of 2 ranks at step {last}" in ends[0]
    assert not job.folders()


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("wrapper", ["nn", "rows", "zero"])
def test_node_that_is_there_again_is_used_again(cluster, tmp_path, python, wrapper):
    """Its memory is empty: the other node has what all ranks have alike, and what each had alone.

    So the bits at the end are those of a run without a loss.
    """
    if wrapper == "zero" and (python != sys.executable or not importlib.util.find_spec("torch")):
        pytest.skip("needs PyTorch")
    (tmp_path / "lost").mkdir()
    job = Job(cluster, tmp_path / "lost", python, wrapper, ENDLESS, MORE=str(MORE), **ALIKE)
    step = lose(cluster, job, reachable=True)
    done = job.wait()
    assert done.status == 0, done.output
    (line,) = (line for line in job.said("start 2 of 4") if "finished" not in line)
    found = int(re.fullmatch(r"start 2 of 4, from step (\d+) in memory", line)[1])
    assert found >= step and "begin anew" not in done.output
    ends, last = job.watched.done(), found + 1 + MORE
    assert len(ends) == 4 and len(set(ends)) == 1 and f"of 4 ranks at step {last}" in ends[0]
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Job(cluster, tmp_path / "undisturbed", python, wrapper, last, **ALIKE)
    assert undisturbed.wait().status == 0, undisturbed.output
    assert undisturbed.watched.done() == ends


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("guests", ["there", "lost"])
def test_objects_of_which_each_rank_had_another_one(cluster, tmp_path, python, guests):
    """They come from the node that is left.  If they are lost there too, they are named.

    Then the training begins anew, or from a Checkpoint of its own.
    """
    job = Job(cluster, tmp_path, python, "rows", ENDLESS, MORE=str(MORE))
    step = lose(cluster, job, forget=guests == "lost")
    done = job.wait()
    assert done.status == 0, done.output
    (line,) = job.said("left out")
    why = "of which all ranks have left records: that of rank 2 is gone; each rank had another u"
    found = re.fullmatch(r"node n2 is left out; start 2 of 4 on 2 ranks(.*)", line)[1]
    if guests == "there":
        last = int(re.fullmatch(r", from step (\d+) in memory", found)[1])
        assert last >= step and not job.said(why), done.output
    else:
        last = 0
        assert not found and len(job.said(why)) == 1, done.output
    ends = {line.partition(" of ")[2] for line in job.watched.done()}
    assert ends == {f"2 ranks at step {last + 1 + MORE}"}


@pytest.mark.long
@each_mpi
def test_too_few_ranks_end_the_job(cluster, tmp_path, python):
    job = Job(cluster, tmp_path, python, "numpy", ENDLESS, "--min-ranks", "3")
    lose(cluster, job)
    done = job.wait()
    assert done.status not in (0, None), done.output
    assert job.said("left out") == ["node n2 is left out; 2 ranks left, --min-ranks 3"]


@pytest.mark.long
@each_mpi
def test_killed_rank_on_nodes_that_stay_ends_with_the_bits_of_an_undisturbed_run(
    cluster, tmp_path, python
):
    ends = []
    for name, kills in (("undisturbed", ""), ("killed", "3:after:20:0 0:stepped:6:1")):
        (tmp_path / name).mkdir()
        job = Job(cluster, tmp_path / name, python, "rows", 60, KILL=kills, **ALIKE)
        assert job.wait().status == 0, job.output
        ends += job.watched.done()
        assert not job.folders()
    assert len(ends) == 8 and len(set(ends)) == 1, job.output
    assert len(job.said("from step 19 in memory")) == 1, job.output


@pytest.mark.long
@each_mpi
def test_monitors_remove_the_records_of_a_killed_mpidist_run(cluster, tmp_path, python):
    job = Job(cluster, tmp_path, python, "numpy", ENDLESS)
    job.reaches(20)
    (run,) = (pid for pid in cluster._inhabitants() if "mpidist run" in words_of(pid))
    kill([run])
    until = time.monotonic() + LIMIT
    while len(job.folders()) > 1:
        assert time.monotonic() < until, job.folders()
        time.sleep(0.1)
    (left,) = job.folders()  # that of mpidist run itself, which its next one there removes
    assert cluster.pids["head"] == int(left.parts[2])
    job.wait()
