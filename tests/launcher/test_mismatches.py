"""Real jobs in which a rank goes its own way: do their flight records say which, and where?"""

from pathlib import Path

import pytest

from mpidist.launcher.flight import Job
from tests.support import mismatch_job, processes
from tests.support.jobs import PYTHONS, ROOT

APART_NS = 100_000_000  # before it begins a call, a rank may have to prepare it


def check(tmp_path, python, seed):
    """One of 10 kinds of mismatch on 2 to 5 ranks; some on several nodes, or without C."""
    size, nodes, plain = 2 + seed % 4, seed % 3 == 0, seed % 5 == 0
    environ = {"MPIDIST_FLIGHT": str(tmp_path / "flights"), "PYTHONPATH": str(ROOT)}
    if nodes:
        environ["MPIDIST_RANKS_PER_NODE"] = "2"
    words = [mismatch_job.__file__, str(seed), str(tmp_path), *["plain"] * plain]
    command = processes.mpiexec(size, *words, python=python)
    done = processes.run(command, 120, processes.environment(**environ))
    assert not done.timed_out, done.output
    assert all(mismatch_job.stopped(tmp_path, rank) for rank in range(size)), done.output
    (job,) = Path(environ["MPIDIST_FLIGHT"]).iterdir()
    said, wanted = Job(job).divergences(), mismatch_job.expected(tmp_path, size)
    if len(wanted) > 1 and wanted[1].time < wanted[0].time + APART_NS:
        said, wanted = sorted(said), sorted(wanted, key=lambda each: each.line)
    assert wanted and len(said) == len(wanted), (said, wanted)
    assert all(want.said_by(line) for want, line in zip(wanted, said)), (said, wanted)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 3, 6, 8, 25, 27])
def test_first_divergence(tmp_path, seed):
    check(tmp_path, [*PYTHONS.values()][seed % len(PYTHONS)], seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30, 42))
def test_first_divergence_of_many(tmp_path, seed):
    check(tmp_path, [*PYTHONS.values()][seed % 7 % len(PYTHONS)], seed)
