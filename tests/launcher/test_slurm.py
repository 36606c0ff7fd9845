"""Layouts and launchers in an allocation, from the environment alone."""

import pytest

from mpidist.errors import InvalidArgument, LaunchError
from mpidist.launcher import slurm
from mpidist.launcher.allocation import SlurmAllocation
from mpidist.launcher.mpi import InstalledMpi
from mpidist.launcher.slurm import choose_launcher, place, slurm_command
from tests.support.launcher_kits import JOB


@pytest.mark.parametrize(
    ("ranks", "each", "expected"),
    [
        (None, None, (4, 2, 2, False)),
        (2, None, (2, 1, 2, False)),
        (3, None, (3, 2, 2, False)),
        (10, None, (10, 2, 5, True)),
        (None, 4, (8, 2, 4, False)),
        (2, 1, (2, 2, 1, False)),
    ],
)
def test_place_fills_node_after_node(ranks, each, expected):
    placed = place(SlurmAllocation.find(JOB), ranks, each)
    assert (placed.ranks, placed.nodes, placed.per_node, placed.oversubscribed) == expected


def test_place_refuses_what_does_not_fit():
    found = SlurmAllocation.find(JOB)
    with pytest.raises(InvalidArgument, match=r"needs 5 nodes; job 7 has 2: n\[1-2\]"):
        place(found, 9, 2)
    tasks = {k: v for k, v in JOB.items() if k != "SLURM_NTASKS"}
    with pytest.raises(InvalidArgument, match="-n is missing: job 7"):
        place(SlurmAllocation.find(tasks), None, None)


def test_slurm_command(monkeypatch):
    monkeypatch.setattr(slurm, "find_launcher", lambda vendor: "mpiexec")
    threads = SlurmAllocation.find({**JOB, "SLURM_CPUS_PER_TASK": "2"})
    srun = slurm_command("Open MPI", "pmix", place(threads, None, None))
    assert srun[:3] == ["srun", "--mpi=pmix", "--kill-on-bad-exit=1"]
    assert "--cpus-per-task=2" in srun and "--cpu-bind=cores" in srun
    assert not place(
        threads, 6, None
    ).oversubscribed  # three ranks on four cores, if not with two each
    crowded = place(threads, 10, None)
    assert slurm_command("MPICH", "pmi2", crowded)[-2:] == ["--overcommit", "--cpu-bind=none"]
    line = slurm_command("Open MPI", None, crowded)
    assert line[3:] == ["--map-by", "ppr:5:node:oversubscribe", "--bind-to", "none"]
    assert slurm_command("MPICH", None, place(threads, None, None))[-1] == "core:2"


UNEVEN = {**JOB, "SLURM_TASKS_PER_NODE": "1,3", "SLURM_JOB_CPUS_PER_NODE": "1,3"}


def test_place_keeps_the_layout_of_slurm(monkeypatch):
    """One task on the first node, three on the second; with -n or --ranks-per-node as asked."""
    monkeypatch.setattr(slurm, "find_launcher", lambda vendor: "mpiexec")
    found = SlurmAllocation.find(UNEVEN)
    placed = place(found, None, None)
    assert (placed.ranks, placed.nodes, placed.uneven, placed.oversubscribed) == (4, 2, True, False)
    fewer = place(found, 3, None)  # one and two
    assert (fewer.ranks, fewer.nodes, fewer.per_node, fewer.oversubscribed) == (3, 2, 2, False)
    srun = slurm_command("MPICH", "pmi2", placed)
    assert {"--export=ALL", "--nodes=2", "--ntasks=4"} < set(srun)
    assert not [word for word in srun if word.startswith(("--ntasks-per", "--distribution"))]
    mapped = ["--map-by", "slot", "--bind-to", "core"]
    assert slurm_command("Open MPI", None, placed)[3:] == mapped
    assert slurm_command("MPICH", None, placed)[3:] == ["-bind-to", "core:1"]
    assert place(found, 4, None) == placed and not place(found, 2, 1).uneven


def test_place_hardware_threads_are_not_cores(monkeypatch):
    """Four CPUs a node are two cores of two threads each: four ranks share them."""
    monkeypatch.setattr(slurm, "find_launcher", lambda vendor: "mpiexec")
    found = SlurmAllocation.find(JOB)
    four = place(found, None, 4, threads=2)
    assert (
        four.by_threads
        and not four.oversubscribed
        and not place(found, None, 2, threads=2).by_threads
    )
    assert slurm_command("Open MPI", "pmix", four)[-1] == "--cpu-bind=threads"
    shared = ["--map-by", "ppr:4:node:HWTCPUS:oversubscribe", "--bind-to", "hwthread"]
    assert slurm_command("Open MPI", None, four)[3:] == shared
    assert slurm_command("MPICH", None, four)[-1] == "hwthread:1"
    two = place(SlurmAllocation.find({**JOB, "SLURM_CPUS_PER_TASK": "2"}), None, 2, threads=2)
    assert (two.cpus, two.cores, two.by_threads) == (2, 1, False)
    assert "--cpus-per-task=2" in slurm_command("Open MPI", "pmix", two)
    assert ":PE" not in " ".join(slurm_command("Open MPI", None, two))


@pytest.mark.parametrize(
    ("vendor", "launcher", "plugin", "offered", "told"),
    [
        ("Open MPI", "auto", "pmi2", ["pmi2", "pmix"], "use --mpi pmix, or --launcher mpiexec"),
        ("MPICH", "auto", "pmix", ["pmi2", "pmix"], "use --mpi pmi2, or --launcher mpiexec"),
        ("MPICH", "mpiexec", "pmi2", ["pmi2"], "only for srun"),
        ("Open MPI", "srun", None, ["none", "pmi2"], "it needs --mpi=pmix, and this SLURM has"),
        ("Intel MPI", "srun", None, ["pmi2"], "set I_MPI_PMI_LIBRARY to SLURM's libpmi2.so"),
        ("MVAPICH", "srun", None, ["pmi2"], "use --launcher mpiexec"),
        ("Open MPI", "srun", None, [], "no srun"),
    ],
)
def test_choose_launcher_refuses_singletons(monkeypatch, vendor, launcher, plugin, offered, told):
    monkeypatch.setattr(slurm, "srun_plugins", lambda: offered)
    with pytest.raises(LaunchError, match=told):
        choose_launcher(InstalledMpi(vendor), launcher, plugin)


def test_choose_launcher_other_libraries(monkeypatch):
    """How an MPICH was configured, and whose it is, decides what it can be started by."""
    monkeypatch.setattr(slurm, "srun_plugins", lambda: ["cray_shasta", "pmi2", "pmix_v4"])
    with_pmix = InstalledMpi("MPICH", "MPICH configure: --with-pmix=/usr --with-pm=none")
    assert choose_launcher(with_pmix, "auto", None) == "pmix_v4"
    assert choose_launcher(with_pmix, "auto", "pmi2") == "pmi2"
    assert choose_launcher(InstalledMpi("Cray MPICH"), "auto", None) == "cray_shasta"
    monkeypatch.setenv("I_MPI_PMI_LIBRARY", "/usr/lib/libpmi2.so")
    assert choose_launcher(InstalledMpi("Intel MPI"), "srun", None) == "pmi2"
    assert choose_launcher(InstalledMpi("Intel MPI"), "auto", None) is None


def test_choose_launcher_srun_where_it_can(monkeypatch):
    monkeypatch.setattr(slurm, "srun_plugins", lambda: ["none", "pmi2", "pmix_v4"])
    assert choose_launcher(InstalledMpi("Open MPI"), "auto", None) == "pmix_v4"
    assert choose_launcher(InstalledMpi("MPICH"), "auto", None) == "pmi2"
    assert choose_launcher(InstalledMpi("MPICH"), "mpiexec", None) is None
    monkeypatch.setattr(slurm, "srun_plugins", lambda: ["none"])
    assert choose_launcher(InstalledMpi("MPICH"), "auto", None) is None
