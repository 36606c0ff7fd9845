"""What ``mpidist run`` starts in an allocation, and what it and init() refuse there."""

import re

import pytest

from tests.support.slurm_cluster import LONG, ROOT, why_not

SAY = (
    "import mpidist, socket, os\n"
    "comm = mpidist.init()\n"
    "t = comm.topology\n"
    "print(f'<{comm.rank} of {comm.size} on {t.groups} {socket.gethostname()}>', flush=True)\n"
    "assert float(comm.allreduce(comm.rank)) == comm.size * (comm.size - 1) / 2\n"
)
RUN = "exec mpidist run "
TWO = ("--nodes=2", "--ntasks-per-node=2")


@pytest.fixture
def script(tmp_path):
    (tmp_path / "say.py").write_text(SAY)

    def write(name, line):
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{line}\n")
        return str(tmp_path / name)

    return write


def said(output):
    return sorted(re.findall(r"<(\d) of (\d) on (\S.*?) (n\d)>", output))


def test_srun_and_mpiexec(cluster, mpi, user, script):
    """The ranks fill node after node, alike by both launchers, with more ranks than cores too."""
    lines = {
        "srun": RUN + "say.py",
        "mpiexec": RUN + "--launcher mpiexec say.py",
        "crowded": RUN + "-n 6 --label --log-dir logs say.py; cat logs/*",
    }
    lines["crowded"] = lines["crowded"].replace("exec ", "")
    jobs = {n: cluster.submit(*TWO, script(n, line), **user) for n, line in lines.items()}
    done = {name: cluster.wait(job) for name, job in jobs.items()}
    for name, job in done.items():
        assert job.completed, f"{name}: {job.output}"
    groups = "((0, 1), (2, 3))"
    expected = [(str(r), "4", groups, f"n{1 + r // 2}") for r in range(4)]
    hosts = {name: said(job.output) for name, job in done.items()}
    assert [(r, s, g) for r, s, g, _ in hosts["srun"]] == [e[:3] for e in expected]
    assert [(r, s, g) for r, s, g, _ in hosts["mpiexec"]] == [e[:3] for e in expected]
    plugin = "pmi2" if mpi == "mpich" else "pmix"
    assert f"srun --mpi={plugin} --kill-on-bad-exit=1 --export=ALL --nodes=2" in done["srun"].output
    assert "--overcommit --cpu-bind=none" in done["crowded"].output
    six = said(done["crowded"].output)
    assert {r for r, *_ in six} == set("012345")  # from the files
    assert len(six) == 7 and re.search(r"^0: <0 of 6", done["crowded"].output, re.M)


def test_as_slurm_placed_the_tasks(cluster, mpi, user, script):
    """Nodes with different numbers of tasks, a job without its user's environment, and a shell.

    The shell is a step of one task; its ranks are the job's all the same.
    """
    plugin = "pmi2" if mpi == "mpich" else "pmix"
    lines = [f"export {name}={value}" for name, value in user.items()]
    lines += ["echo tasks $SLURM_TASKS_PER_NODE"]
    lines += ["mpidist run say.py || exit 1", "mpidist run --launcher mpiexec say.py || exit 1"]
    if LONG:  # a shell of one task is no rank of a job
        shell = f"srun -n1 -N1 --export=ALL --mpi={plugin}"
        lines += [f"{shell} mpidist run -n 2 --ranks-per-node 1 say.py || exit 1"]
        lines += [f"{shell} mpidist run say.py || exit 1"]
        lines += [f"exec {shell} mpidist run --launcher mpiexec say.py"]
    options = ("--nodes=2", "--ntasks=3", "--export=NONE")
    done = cluster.wait(cluster.submit(*options, script("uneven", "\n".join(lines)), **user))
    assert done.completed, f"{done.state} {done.exit_code}\n{done.output}"
    tasks = re.search(r"tasks (\d),(\d)", done.output)
    assert tasks, done.output
    first = tuple(range(int(tasks[1])))
    groups = str((first, tuple(range(len(first), 3))))
    found = said(done.output)
    assert [(r, g) for r, size, g, _ in found if size == "3"] == [
        (str(rank), groups) for rank in range(3) for _ in range(2 + 2 * LONG)
    ]
    assert [(r, g) for r, size, g, _ in found if size == "2"] == [
        (str(rank), "((0,), (1,))") for rank in range(2 * LONG)
    ]


def test_wrong_combinations(cluster, mpi, user, script):
    """Each ends at once with a message that has the cure, and not with exit code 0."""
    wrong, right = ("pmix", "pmi2") if mpi == "mpich" else ("pmi2", "pmix")
    alone = f"--mpi={right} (" + ("MPICH" if mpi == "mpich" else "Open MPI")
    other = "unsupported PMI version" if mpi == "mpich" else alone
    cases = {
        "plugin": (RUN + f"--mpi {wrong} say.py", f"use --mpi {right}, or --launcher mpiexec"),
        "plain": ("exec srun -n4 -K1 python say.py", alone),
        "other": (f"exec srun -n4 -K1 --mpi={wrong} python say.py", other),
        "nested": (f"exec srun -n2 -K1 --mpi={right} mpidist run say.py", "was itself started by"),
        "nodes": (RUN + "-n 9 --ranks-per-node 2 say.py", "needs 5 nodes; job"),
    }
    jobs = {n: cluster.submit(*TWO, script(n, c[0]), **user) for n, c in cases.items()}
    for name, job in jobs.items():
        done = cluster.wait(job)
        assert done.state == "FAILED", f"{name}: {done.state} {done.exit_code}\n{done.output}"
        text = " ".join(done.output.split())
        assert cases[name][1] in text, f"{name}: {done.output}"
        assert not said(done.output), f"{name}: {done.output}"


def test_info_of_an_allocation(cluster, mpi, user, script):
    job = cluster.submit(*TWO, script("info", RUN + "mpidist info --links"), **user)
    done = cluster.wait(job)
    assert done.completed, done.output
    text = " ".join(done.output.split())
    assert "4 on 2 nodes: 2 + 2" in text and "partition test" in text, done.output
    assert re.search(r"eth0 10\.77\.0\.\d", text), done.output
    across = re.search(r"n\d – n\d ([\d.,]+) ([\d.]+)", text)
    assert across, done.output
    assert float(across[1].replace(",", "")) >= 100 and 0.01 <= float(across[2]) <= 0.25
    assert re.search(r"allreduce(?: \S+){0,3} hierarchical", text), done.output


@pytest.mark.skipif(not LONG, reason="takes a minute or two: make test-slurm")
def test_every_algorithm_over_the_slow_link(cluster, mpi, user, script):
    """Two nodes of two ranks, 1 Gbit/s and 100 µs; every root, in place or not, in segments too."""
    job = ROOT / "tests" / "support" / "slow_link_job.py"
    done = cluster.wait(cluster.submit(*TWO, script("every", f"{RUN}{job} every"), **user), 300)
    assert done.completed and "every: yes" in done.output, done.output


def test_what_is_missing_is_told():
    """The reason why these tests are skipped where there is no Slurm names the packages."""
    assert why_not() == "" or "apt-get install" in why_not()
