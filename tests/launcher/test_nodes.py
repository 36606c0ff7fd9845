"""The nodes of a job: which there are, and the starts without some of them."""

import os
from types import SimpleNamespace

import pytest

from mpidist.errors import InvalidArgument
from mpidist.launcher import allocation as allocations
from mpidist.launcher import nodes as module
from mpidist.launcher.allocation import SlurmAllocation
from mpidist.launcher.command_line import slurm_launch
from mpidist.launcher.job import JobOptions
from mpidist.launcher.mpi import MPICH, OPEN_MPI
from mpidist.launcher.nodes import Nodes, short
from mpidist.launcher.ranks import RankState
from mpidist.launcher.restarts import Restarts
from tests.support.launcher_kits import JOB

STATES = """NodeName=n1 Arch=x86_64 State=MIXED Boards=1
NodeName=n2 Arch=x86_64 State=DOWN+NOT_RESPONDING Boards=1
NodeName=n3 Arch=x86_64 State=ALLOCATED* Boards=1
"""


def of_file(tmp_path, text, vendor=MPICH, name="HYDRA_HOST_FILE"):
    (tmp_path / "hosts").write_text(text)
    return Nodes.find(vendor, None, {name: str(tmp_path / "hosts"), "OTHER": "1"})


def of_slurm(monkeypatch, answer=STATES):
    def scontrol(*words):
        return "n1\nn2\nn3\n" if "hostnames" in words else answer

    monkeypatch.setattr(allocations, "_scontrol", scontrol)
    granted = SlurmAllocation("7", "n[1-3]", (2, 4, 2), (2, 4, 2))
    return Nodes.find(OPEN_MPI, granted, dict(JOB))


@pytest.mark.parametrize(
    "vendor, name, text, left",
    [
        (MPICH, "HYDRA_HOST_FILE", "n1:2\n# none\nn2:2\n", "n1:2\n"),
        (
            OPEN_MPI,
            "PRTE_MCA_prte_default_hostfile",
            "n2 slots=2\nn1\nn1 # again\n",
            "n1\nn1 # again\n",
        ),
    ],
)
def test_nodes_of_a_file(tmp_path, vendor, name, text, left):
    nodes = of_file(tmp_path, text, vendor, name)
    assert sorted(nodes.names) == ["n1", "n2"] and nodes.settings == {}
    nodes.leave_out(["n2"])
    assert nodes.names == ["n1"] and nodes.left_out == ["n2"]
    with open(nodes.settings[name]) as file:
        assert file.read() == left


def test_nobody_knows_the_nodes(tmp_path, monkeypatch):
    assert of_file(tmp_path, "n1\n", OPEN_MPI) is None  # a file of MPICH
    assert of_file(tmp_path, "# none\n") is None
    assert Nodes.find(MPICH, None, {"PBS_NODEFILE": "f"}) is None
    assert Nodes.find(MPICH, None, {"HYDRA_HOST_FILE": str(tmp_path / "missing")}) is None
    one = SlurmAllocation("7", "n1", (2,))
    assert Nodes.find(OPEN_MPI, one, {}) is None
    monkeypatch.setattr(allocations, "_scontrol", lambda *_: "")  # SLURM does not answer
    assert Nodes.find(OPEN_MPI, SlurmAllocation("7", "n[1-2]", (2, 2)), {}) is None


def test_allocation_without_a_node(monkeypatch):
    nodes = of_slurm(monkeypatch)
    nodes.leave_out(["n2"])
    assert nodes.allocation.cpus == nodes.allocation.tasks == (2, 2)
    assert nodes.settings["SLURM_JOB_NODELIST"] == nodes.settings["SLURM_NODELIST"] == "n1,n3"
    assert nodes.settings["SLURM_NNODES"] == "2" and nodes.settings["SLURM_OVERLAP"] == "1"
    assert nodes.settings["SLURM_TASKS_PER_NODE"] == "2,2"
    launch = slurm_launch(OPEN_MPI, "pmix", nodes.allocation, 4, None, nodes.left_out)
    assert "--exclude=n2" in launch.launcher and "--nodes=2" in launch.launcher


def test_nodes_that_are_down_are_not_asked(monkeypatch):
    nodes, asked = of_slurm(monkeypatch), []

    def run(command, seconds, environ):
        asked.append(command)
        return SimpleNamespace(status=0, output="here\n")

    monkeypatch.setattr(module, "run_limited", run)
    assert nodes.ask("hostname") == {"n1": "here\n", "n2": None, "n3": None}
    (command,) = asked
    assert command[0] == "srun" and "--nodelist=n1" in command and command[-1] == "hostname"


def test_node_on_which_a_program_does_not_end_well(tmp_path, monkeypatch):
    nodes = of_file(tmp_path, "n1\nn2\nn3\n")
    monkeypatch.setattr(module, "find_launcher", lambda vendor: "mpiexec")
    status = {"n1": 0, "n2": 1, "n3": None}

    tried = []

    def run(command, seconds, environ):
        tried.append(command[4])
        assert command[:3] == ["mpiexec", "-n", "1"] and environ == {"OTHER": "1"}
        return SimpleNamespace(status=status[command[4]], output="x")

    monkeypatch.setattr(module, "run_limited", run)
    assert nodes.ask("true") == {"n1": "x", "n2": None, "n3": None}
    assert sorted(tried) == ["n1", "n2", "n2", "n3", "n3"]


@pytest.mark.parametrize(
    "host, name", [("n1.site.org", "n1"), ("n1", "n1"), ("10.0.0.7", "10.0.0.7")]
)
def test_short(host, name):
    assert short(host) == name


def lost(*hosts, told="rank 3 on n2 was killed"):
    known = {rank: RankState(rank, host, status=-9) for rank, host in enumerate(hosts)}
    about = {"interrupted": 0, "passed": set(), "stopped": False, "told": told}
    return SimpleNamespace(cause=known.get(0), known=known, ranks=4, **about)


EMPTY = "mpidist records: []\n"


@pytest.mark.parametrize(
    "hosts, answers, ranks, line",
    [
        (
            ["n1", "n1", "n2.site", "n2"],
            {"n2": None},
            2,
            "node n2 is left out; start 2 of 4 on 2 ranks",
        ),
        (
            ["n1", "n2", "n2", "n3"],
            {"n1": None, "n3": "?"},
            2,
            "nodes n1, n3 are left out; start 2 of 4 on 2 ranks",
        ),
        ([], {"n3": None}, 2, "node n3 is left out; start 2 of 4 on 2 ranks"),
        (["n1"] * 4, {}, None, "start 2 of 4"),
        (["n1"] * 4, dict.fromkeys(["n1", "n2", "n3"]), None, "start 2 of 4"),  # the way is wrong
    ],
)
def test_next_start_is_on_the_nodes_that_answer(
    tmp_path, monkeypatch, capfd, hosts, answers, ranks, line
):
    nodes = of_file(tmp_path, "n1:2\nn2:2\nn3:2\n")
    monkeypatch.setattr(
        Nodes, "ask", lambda self, *_, **__: {**dict.fromkeys(self.names, EMPTY), **answers}
    )
    with Restarts(3, True, nodes) as starts:
        assert starts.again(lost(*hosts), 137)
        assert starts.ranks == ranks
        assert capfd.readouterr().err == f"mpidist run: {line}\n"
        answers.clear()


def test_too_few_ranks_are_left(tmp_path, monkeypatch, capfd):
    nodes = of_file(tmp_path, "n1:2\nn2:2\n")
    monkeypatch.setattr(
        Nodes,
        "ask",
        lambda self, *_, **__: {"n1": None, "n2": EMPTY} if len(self.names) > 1 else {"n2": EMPTY},
    )
    with Restarts(3, True, nodes, min_ranks=3) as starts:
        assert not starts.again(lost("n1", "n1", "n2", "n2"), 137)
    said = capfd.readouterr().err
    assert "node n1 is left out; 2 ranks left, --min-ranks 3\n" in said
    assert "node n1: the records in /dev/shm/mpidist-vaults-nodes-" not in said  # it is left out


def test_options_on_fewer_ranks():
    fewer = JobOptions(ranks=4, spares=2).on_fewer(5)
    assert fewer == JobOptions(ranks=4, spares=1, survive=True)
    assert JobOptions(ranks=4, spares=2).on_fewer(3) == JobOptions(ranks=3, survive=True)
    assert JobOptions().on_fewer(3) == JobOptions(ranks=3)
    with pytest.raises(InvalidArgument, match="--min-ranks 2: only with --max-restarts"):
        JobOptions(min_ranks=2).check(None)
    with pytest.raises(InvalidArgument, match="--min-ranks 8: expected at most the 4 of -n"):
        JobOptions(ranks=4, min_ranks=8, max_restarts=1).check(None)


def test_records_that_cannot_be_removed_are_told(tmp_path, monkeypatch, capfd):
    nodes = of_file(tmp_path, "n1:2\nn2:2\n")
    monkeypatch.setattr(Nodes, "ask", lambda *_, **__: {"n1": None, "n2": ""})
    with Restarts(3, True, nodes) as starts:
        folder = starts.settings["MPIDIST_VAULTS"]
    assert not os.path.exists(folder)
    line = f"node n1: the records in {folder} could not be removed"
    assert capfd.readouterr().err == f"mpidist run: {line}\n"
