"""Launch lines in an allocation, from the environment alone; and the watch, on this machine."""

import contextlib
import os
import socket
import sys
import threading

import pytest
from processes import environment, run

from mpidist.allocation import Allocation, per_node
from mpidist.commands import slurm_line
from mpidist.commands.launchers import read_knobs
from mpidist.commands.slurm_line import choose_launcher, place, slurm_command
from mpidist.commands.watch import Watch
from mpidist.errors import InvalidArgument, LaunchError
from mpidist.links import pairs_of

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
    assert Allocation.find({}) is None


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
    placed = place(Allocation.find(JOB), ranks, each)
    assert (placed.ranks, placed.nodes, placed.per_node, placed.crowded) == expected


def test_what_does_not_fit():
    found = Allocation.find(JOB)
    with pytest.raises(InvalidArgument, match=r"needs 5 nodes; job 7 has 2: n\[1-2\]"):
        place(found, 9, 2)
    tasks = {k: v for k, v in JOB.items() if k != "SLURM_NTASKS"}
    with pytest.raises(InvalidArgument, match="-n is missing: job 7"):
        place(Allocation.find(tasks), None, None)


def test_lines(monkeypatch):
    monkeypatch.setattr(slurm_line, "find_launcher", lambda vendor: "mpiexec")
    threads = Allocation.find({**JOB, "SLURM_CPUS_PER_TASK": "2"})
    srun = slurm_command("Open MPI", "pmix", place(threads, None, None))
    assert srun[:3] == ["srun", "--mpi=pmix", "--kill-on-bad-exit=1"]
    assert "--cpus-per-task=2" in srun and "--cpu-bind=cores" in srun
    crowded = place(threads, 6, None)
    assert slurm_command("MPICH", "pmi2", crowded)[-2:] == ["--overcommit", "--cpu-bind=none"]
    line = slurm_command("Open MPI", None, crowded)
    assert line[3:] == ["--map-by", "ppr:3:node:oversubscribe", "--bind-to", "none"]
    assert slurm_command("MPICH", None, place(threads, None, None))[-1] == "core:2"


@pytest.mark.parametrize(
    ("vendor", "launcher", "plugin", "offered", "told"),
    [
        ("Open MPI", "auto", "pmi2", ["pmi2", "pmix"], "use --mpi pmix, or --launcher mpiexec"),
        ("MPICH", "auto", "pmix", ["pmi2", "pmix"], "use --mpi pmi2, or --launcher mpiexec"),
        ("MPICH", "mpiexec", "pmi2", ["pmi2"], "is for srun"),
        ("Open MPI", "srun", None, ["none", "pmi2"], "it needs --mpi=pmix, and this SLURM has"),
        ("Intel MPI", "srun", None, ["pmi2"], "use --launcher mpiexec"),
        ("Open MPI", "srun", None, [], "no srun"),
    ],
)
def test_silent_singletons_are_refused(monkeypatch, vendor, launcher, plugin, offered, told):
    monkeypatch.setattr(slurm_line, "srun_plugins", lambda: offered)
    with pytest.raises(LaunchError, match=told):
        choose_launcher(vendor, launcher, plugin)


def test_srun_where_it_can_start_this_mpi(monkeypatch):
    monkeypatch.setattr(slurm_line, "srun_plugins", lambda: ["none", "pmi2", "pmix_v4"])
    assert choose_launcher("Open MPI", "auto", None) == "pmix_v4"
    assert choose_launcher("MPICH", "auto", None) == "pmi2"
    assert choose_launcher("MPICH", "mpiexec", None) is None
    monkeypatch.setattr(slurm_line, "srun_plugins", lambda: ["none"])
    assert choose_launcher("MPICH", "auto", None) is None


def test_knobs(tmp_path):
    (tmp_path / "env.mpich").write_text("# why\nA=1  # a reason\nB=^x,y # another\n\n")
    assert read_knobs(str(tmp_path), "MPICH") == {"A": "1", "B": "^x,y"}
    with pytest.raises(InvalidArgument, match="env.openmpi"):
        read_knobs(str(tmp_path), "Open MPI")
    (tmp_path / "env.mpich").write_text("export A\n")
    with pytest.raises(InvalidArgument, match="line 1: 'export A'"):
        read_knobs(str(tmp_path), "MPICH")


def test_pairs_of_links():
    assert pairs_of(((0, 1), (2, 3))) == [(0, 1), (2, 3), (0, 2)]
    assert len(pairs_of(tuple((k,) for k in range(20)))) == 20


@pytest.mark.parametrize(
    ("program", "status", "told"),
    [
        ("print('all well')", 0, "0: all well"),
        ("import sys; sys.exit(3)", 3, "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", 137, "was ended by signal 9 (SIGKILL)"),
    ],
)
def test_the_watch_tells_how_ranks_end(tmp_path, program, status, told):
    (tmp_path / "program.py").write_text(program)
    words = ["-m", "mpidist", "run", "-n", "2", "--label", str(tmp_path / "program.py")]
    done = run([sys.executable, *words], 40, environment())
    assert done.status == status and told in done.output, done.output


@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\r\n\r\n", b"7\n", b"{}\n", b"x" * 100000])
def test_the_watch_does_not_listen_to_strangers(said):
    """A port scan must not end a job: the one rank ends well after it."""
    watch = Watch(1)
    port = watch._door.getsockname()[1]

    def visit():
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
            stranger.settimeout(20)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""  # it is shown the door

    guest = threading.Thread(target=visit)
    guest.start()
    rank = {**environment(), "OMPI_COMM_WORLD_RANK": "0"}
    assert (
        watch.run(watch.command([sys.executable, "-c", "import time; time.sleep(0.5)"]), rank) == 0
    )
    guest.join()


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path):
    os.symlink("/dev/full", tmp_path / "rank-00000.log")
    program = "for k in range(3000): print('a line that does not fit', k)"
    watch = Watch(1, logs=str(tmp_path))
    rank = {**environment(), "OMPI_COMM_WORLD_RANK": "0"}
    assert watch.run(watch.command([sys.executable, "-c", program]), rank) == 0
