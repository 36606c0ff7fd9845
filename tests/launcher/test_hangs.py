"""Kinds of hang, each with both MPIs, on one node and on two: the roll call names the odd rank.

`make stress` has every kind in each of these launches, and prints what was told.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support import hangs, processes
from tests.support.how_long import STRESS
from tests.support.jobs import PYTHONS
from tests.support.minicluster import Cluster, running

LAUNCHES = [(mpi, nodes) for nodes in (1, 2) for mpi in PYTHONS]
STILL, LIMIT = 0.8, 100  # seconds, for the roll call and of a job
TOLD = re.compile(r"ranks? ([\d, -]+): ")


def cases():
    """Yield kinds, each with one of the launches, or with all."""
    for n, kind in enumerate(hangs.KINDS):
        known = [x for x in LAUNCHES if kind != "loader" or PYTHONS[x[0]] == sys.executable]
        for mpi, nodes in known if STRESS else [known[n % len(known)]]:
            yield pytest.param(kind, mpi, nodes, id=f"{kind}-{mpi}-{nodes}")


def ranks_of(line):
    """The ranks of the first line of a group."""
    told = TOLD.match(line)
    ends = [part.split("-") for part in told[1].split(", ")] if told else []
    return [rank for each in ends for rank in range(int(each[0]), int(each[-1]) + 1)]


class Hang:
    """Reads what `mpidist run` prints; its job goes on once the roll call has told of all ranks.

    On a loaded machine a rank may be late, or lines may be: then it asks for another roll call.
    """

    def __init__(self, folder, ranks, odd):
        self.folder, self.ranks, self.odd, self.told = folder, ranks, odd, []
        os.mkfifo(folder / "fifo")
        self._over = False

    def read(self, line):
        line = line.rstrip().removeprefix("mpidist run: ")
        if self._over or not (self.told or line.startswith("roll call of ")):
            return
        if line.startswith("roll call of "):
            self.told = []
            # All its lines are printed at once.
            threading.Timer(0.4, self._release, [self._hangs(), "deadline" in line]).start()
        self.told.append(line)

    def _hangs(self):
        """Whether it hangs for so long that the roll was called after that, and not before."""
        with contextlib.suppress(FileNotFoundError):
            return time.time() - (self.folder / "begun").stat().st_mtime > STILL
        return False

    def _others_wait(self):
        """Whether the ranks that are not odd are where they stay: of bare MPI only stacks tell."""
        return all(
            "waiting since" in line or " bare_mpi <" in stack
            for line, stack in pairwise([*self.told, ""])
            if not set(ranks_of(line)) <= set(self.odd)
        )

    def _release(self, hangs, last):
        if self._over:
            return
        found = [rank for line in self.told for rank in ranks_of(line)]
        if not hangs or sorted(found) != list(range(self.ranks)) or not self._others_wait():
            if not last:
                os.kill(int((self.folder / "pid").read_text()), signal.SIGQUIT)
            return
        self._over = True
        (self.folder / "released").touch()
        with contextlib.suppress(OSError):  # nobody reads it
            os.close(os.open(self.folder / "fifo", os.O_WRONLY | os.O_NONBLOCK))
        for pid in re.findall(r"state T .*; pid (\d+)", "\n".join(self.told)):
            os.kill(int(pid), signal.SIGCONT)


def run(python, nodes, folder, still, program, on_line=lambda line: None, **more):
    """Run a job of three ranks, or of four on two nodes; the roll is called after some seconds."""
    more["MPIDIST_FLIGHT"] = str(folder / "flights")
    options = ["-q", "--roll-call", str(still), "-n", "3" if nodes == 1 else "4"]
    known = ["sh", "-c", f'echo $$ > {folder}/pid; exec "$@"', "sh"]
    command = [*known, python, "-m", "mpidist", "run", *options]
    if nodes == 1:
        environ = processes.environment(**more)
        return processes.run([*command, *program], LIMIT, environ, on_line=on_line)
    (folder / "of_open_mpi").write_text("n1 slots=2\nn2 slots=2\n")
    (folder / "of_mpich").write_text("n1:2\nn2:2\n")
    more |= {
        "PRTE_MCA_prte_default_hostfile": str(folder / "of_open_mpi"),
        "PRTE_MCA_rmaps_default_mapping_policy": "ppr:2:node",
        "HYDRA_HOST_FILE": str(folder / "of_mpich"),
    }
    with running(Cluster(nodes=2)) as cluster:
        # It is on a third node, and has no records: the monitors look.
        inside = cluster.inside("head", *command, "--watch", *program)
        return processes.run(inside, LIMIT, {**cluster.environment(), **more}, on_line=on_line)


@pytest.mark.parametrize(("kind", "mpi", "nodes"), list(cases()))
def test_the_odd_rank_is_named_first(tmp_path, capsys, kind, mpi, nodes):
    python = PYTHONS[mpi]
    if kind == "loader":
        pytest.importorskip("torch", reason="needs PyTorch")
    if kind == "stopped" and not Path(python).with_name("py-spy").exists():
        pytest.skip("needs py-spy")
    ranks = 3 if nodes == 1 else 4
    odd = range(ranks - 1) if kind == "most" else [hangs.ODD]
    hang = Hang(tmp_path, ranks, odd)
    deadline = "6" if kind in hangs.BY_DEADLINE else "60"
    program = [hangs.__file__, kind, str(tmp_path)]
    done = run(python, nodes, tmp_path, STILL, program, hang.read, MPIDIST_TIMEOUT=deadline)
    groups = [n for n, line in enumerate(hang.told) if ranks_of(line)]
    assert groups, done.output
    first, stack = hang.told[groups[0] : groups[0] + 2]
    if STRESS:
        with capsys.disabled():
            print(f"\n{kind}-{mpi}-{nodes}\n  {first}\n  {stack}")
    assert ranks_of(first) == list(odd), done.output
    lines = {(what, int(n)) for n, what in re.findall(r"hangs\.py:(\d+) (\w+)", stack)}
    assert lines & hangs.lines_of(kind), done.output
    if kind == "child":
        below = hang.told[groups[0] + 2]
        assert re.match(r"    child \d+ \(python.*\): state .*, \d+ % CPU$", below), done.output
    # As without a roll call: 0 where the rank went on.
    assert done.status == hangs.ENDS.get(kind, 0), done.output
    if kind in hangs.BY_DEADLINE:
        # Once more, and the exception's traceback follows.
        assert "a deadline has passed on rank" in done.output and "hand_over" not in done.output
        assert "failed first: CollectiveTimeout" in done.output


STEPS = """
import mpidist, numpy, time
comm = mpidist.init()
x = numpy.ones(4)
for step in range(10_000):
    comm.allreduce(x, "max", out=x)
for pause in range(5):
    time.sleep(1.3)
    comm.barrier()
"""


@pytest.mark.parametrize(("mpi", "nodes"), LAUNCHES if STRESS else LAUNCHES[: len(PYTHONS)])
def test_a_healthy_job_is_left_alone(tmp_path, mpi, nodes):
    (tmp_path / "program.py").write_text(STEPS)
    done = run(PYTHONS[mpi], nodes, tmp_path, 6, [str(tmp_path / "program.py")])
    assert (done.status, done.output) == (0, "")
