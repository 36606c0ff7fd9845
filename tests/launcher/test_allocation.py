"""Launch lines in an allocation, from the environment alone."""

import pytest

from mpidist.engine.calibration import pairs_of
from mpidist.errors import InvalidArgument, LaunchError
from mpidist.launcher import allocation, command_line, slurm
from mpidist.launcher.allocation import SlurmAllocation, per_node
from mpidist.launcher.job import check_log_dir, check_not_nested, own_environment
from mpidist.launcher.mpi import InstalledMpi, read_knobs
from mpidist.launcher.slurm import choose_launcher, place, slurm_command

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_PARTITION": "short",
}


def test_numbers_by_node():
    assert per_node("2(x3),1") == (2, 2, 2, 1)
    assert per_node("") == () == per_node("many")


def test_outside_of_an_allocation():
    assert SlurmAllocation.find({}) is None


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
def test_ranks_fill_node_after_node(ranks, each, expected):
    placed = place(SlurmAllocation.find(JOB), ranks, each)
    assert (placed.ranks, placed.nodes, placed.per_node, placed.oversubscribed) == expected


def test_what_does_not_fit():
    found = SlurmAllocation.find(JOB)
    with pytest.raises(InvalidArgument, match=r"needs 5 nodes; job 7 has 2: n\[1-2\]"):
        place(found, 9, 2)
    tasks = {k: v for k, v in JOB.items() if k != "SLURM_NTASKS"}
    with pytest.raises(InvalidArgument, match="-n is missing: job 7"):
        place(SlurmAllocation.find(tasks), None, None)


def test_lines(monkeypatch):
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


def test_the_layout_of_slurm_is_kept(monkeypatch):
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


def test_hardware_threads_are_not_cores(monkeypatch):
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
    ("node", "threads"),
    [
        ("Sockets=1 Boards=1 CoresPerSocket=2 ThreadsPerCore=2 CPUTot=4", 2),
        ("Sockets=1 Boards=1 CoresPerSocket=2 ThreadsPerCore=2 CPUTot=2", 1),
        ("slurm_load_node error: Unable to contact slurm controller", 1),
    ],
)
def test_what_slurm_counts(monkeypatch, node, threads):
    monkeypatch.setattr(allocation, "_scontrol", lambda *_: node)
    assert allocation.threads_per_core(SlurmAllocation.find(JOB)) == threads
    assert allocation.kill_wait() == allocation.KILL_WAIT


def test_a_heterogeneous_job_is_refused():
    parts = SlurmAllocation.find({**JOB, "SLURM_HET_SIZE": "2"})
    with pytest.raises(LaunchError, match="job 7 is heterogeneous, in 2 parts"):
        command_line.slurm_launch("MPICH", "pmi2", parts, None, None)


def test_the_environment_goes_along(monkeypatch):
    """As of sbatch --export=NONE, which every srun of the job would inherit."""
    monkeypatch.setattr(command_line, "threads_per_core", lambda _: 1)
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    found = command_line.slurm_launch("MPICH", "pmi2", SlurmAllocation.find(JOB), None, None)
    assert found.settings["SLURM_EXPORT_ENV"] == "ALL"


def test_requeues_have_a_bound(monkeypatch):
    """A job of an array is queued again alone, and not for ever."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "4"}
    found, asked = SlurmAllocation.find({**JOB, **array}), []

    def ask(command, seconds):
        asked.append(command)
        raise LaunchError("no SLURM here")

    monkeypatch.setattr(allocation, "run_for_output", ask)
    monkeypatch.setattr(allocation, "_scontrol", lambda *_: "")
    with pytest.raises(LaunchError, match=r"requeued 4 times already: the limit is 4 "):
        allocation.requeue(found, 4)
    with pytest.raises(LaunchError, match="no SLURM here"):
        allocation.requeue(found, 5)
    assert asked == [["scontrol", "requeue", "7_3"]]
    # SLURM knows better than a variable that came from the job in which this one was submitted.
    monkeypatch.setattr(allocation, "_scontrol", lambda *_: "JobId=8 Requeue=1 Restarts=0")
    with pytest.raises(LaunchError, match="no SLURM here"):
        allocation.requeue(found, 1)
    array["SLURM_ARRAY_JOB_ID"] = "5"  # its other jobs have numbers of their own, and so has a job
    assert SlurmAllocation.find({**JOB, **array}).job == "7"  # that was submitted from one of them


PTY = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, False),
        ({"PMIX_RANK": "0"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, True),  # of mpiexec, its proxy alone on that node
        ({"PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, True),
    ],
)
def test_shell_of_one_task(more, refused):
    environ = {**PTY, **more}
    if refused:
        with pytest.raises(LaunchError, match="as rank 1: every rank"):
            check_not_nested(environ)
    else:
        check_not_nested(environ)
        assert not [name for name in own_environment(environ) if name.startswith("PMI")]


@pytest.mark.parametrize(
    ("said", "tasks"),
    [
        ("NumTasks=4 CPUs/Task=1 NtasksPerN:B:S:C=2:0:*:*", (2, 2)),
        ("NumTasks=3 CPUs/Task=1 NtasksPerN:B:S:C=0:0:*:*", (2, 1)),
        ("NumTasks=7 CPUs/Task=1 NtasksPerN:B:S:C=0:0:*:*", (4, 3)),
        ("slurm_load_jobs error: Unable to contact slurm controller", (5, 5)),
    ],
)
def test_shell_of_one_task_starts_the_job(monkeypatch, said, tasks):
    """``srun -n1 --pty bash`` has its own number of tasks in the environment."""
    monkeypatch.setattr(allocation, "_scontrol", lambda *_: f"JobId=7 {said}")
    own = {"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "5"}
    environ = {**JOB, **PTY, **own, "SLURM_JOB_CPUS_PER_NODE": "2,1"}
    found = SlurmAllocation.find(environ)
    assert found.tasks == (1,) and allocation.whole_job(found, environ).tasks == tasks
    assert allocation.whole_job(found, JOB) == found
    monkeypatch.setattr(command_line, "threads_per_core", lambda _: 1)
    monkeypatch.setattr(slurm, "find_launcher", lambda _: "mpiexec")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    launch = command_line.slurm_launch(
        "MPICH", None, allocation.whole_job(found, environ), None, None
    )
    assert launch.ranks == sum(tasks)
    assert launch.settings["SLURM_TASKS_PER_NODE"] == ",".join(map(str, tasks))
    assert "SLURM_DISTRIBUTION" not in own_environment({**environ, "SLURM_DISTRIBUTION": "cyclic"})


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
def test_silent_singletons_are_refused(monkeypatch, vendor, launcher, plugin, offered, told):
    monkeypatch.setattr(slurm, "srun_plugins", lambda: offered)
    with pytest.raises(LaunchError, match=told):
        choose_launcher(InstalledMpi(vendor), launcher, plugin)


def test_other_libraries_are_not_refused(monkeypatch):
    """How an MPICH was configured, and whose it is, decides what it can be started by."""
    monkeypatch.setattr(slurm, "srun_plugins", lambda: ["cray_shasta", "pmi2", "pmix_v4"])
    with_pmix = InstalledMpi("MPICH", "MPICH configure: --with-pmix=/usr --with-pm=none")
    assert choose_launcher(with_pmix, "auto", None) == "pmix_v4"
    assert choose_launcher(with_pmix, "auto", "pmi2") == "pmi2"
    assert choose_launcher(InstalledMpi("Cray MPICH"), "auto", None) == "cray_shasta"
    monkeypatch.setenv("I_MPI_PMI_LIBRARY", "/usr/lib/libpmi2.so")
    assert choose_launcher(InstalledMpi("Intel MPI"), "srun", None) == "pmi2"
    assert choose_launcher(InstalledMpi("Intel MPI"), "auto", None) is None


def test_srun_where_it_can_start_this_mpi(monkeypatch):
    monkeypatch.setattr(slurm, "srun_plugins", lambda: ["none", "pmi2", "pmix_v4"])
    assert choose_launcher(InstalledMpi("Open MPI"), "auto", None) == "pmix_v4"
    assert choose_launcher(InstalledMpi("MPICH"), "auto", None) == "pmi2"
    assert choose_launcher(InstalledMpi("MPICH"), "mpiexec", None) is None
    monkeypatch.setattr(slurm, "srun_plugins", lambda: ["none"])
    assert choose_launcher(InstalledMpi("MPICH"), "auto", None) is None


def test_knobs(tmp_path, monkeypatch):
    (tmp_path / "env.mpich").write_text("# why\nA=1  # a reason\nB=^x,y # another\n\n")
    assert read_knobs(str(tmp_path), "MPICH") == {"A": "1", "B": "^x,y"}
    with pytest.raises(InvalidArgument, match="env.openmpi"):
        read_knobs(str(tmp_path), "Open MPI")
    monkeypatch.chdir(tmp_path)  # a script of slurm/ that was submitted elsewhere
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(InvalidArgument, match=r"there is no slurm/env in .*: call it where this"):
        read_knobs("slurm/env", "MPICH")
    with pytest.raises(InvalidArgument, match=r"no such script in .*folder where sbatch was"):
        command_line.rank_command(("slurm/train.py",))
    (tmp_path / "env.mpich").write_text("export A\n")
    with pytest.raises(InvalidArgument, match="line 1: 'export A'"):
        read_knobs(str(tmp_path), "MPICH")


def test_pairs_of_links():
    assert pairs_of(((0, 1), (2, 3))) == [(0, 1), (2, 3), (0, 2)]
    assert len(pairs_of(tuple((k,) for k in range(20)))) == 20


def test_logs_need_a_folder(tmp_path):
    check_log_dir(str(tmp_path / "a" / "b"))
    (tmp_path / "file").write_text("")
    for wrong, why in ((str(tmp_path / "file" / "logs"), "Not a directory"), ("", "No such file")):
        with pytest.raises(InvalidArgument) as caught:
            check_log_dir(wrong)
        assert str(caught.value).startswith(f"--log-dir {wrong!r}: cannot create {wrong!r}: {why}")
        assert "expected a folder" in str(caught.value) and "Errno" not in str(caught.value)
