"""Files of rules for MPI libraries are in force, by the bits of real jobs."""

import pytest

from tests.support.jobs import HERE, LIMIT, ROOT, each_mpi
from tests.support.processes import environment, run


def checked(python, ranks, written, tmp_path):
    """Return what a job says of each rule and size, of a file written for a number of ranks."""
    words = [str(tmp_path / "rules"), str(ranks), str(written)]
    done = run(
        [python, str(HERE / "in_force_job.py"), *words],
        LIMIT,
        environment(PYTHONPATH=str(ROOT)),
    )
    assert done.status == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    said = {(c, name, int(nbytes)): word for c, name, nbytes, word in lines}
    assert len(said) == len(lines) == 8, done.output
    return said


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("ranks", (4, 5))
def test_rules_are_in_force_by_the_bits(python, ranks, tmp_path):
    said = checked(python, ranks, ranks, tmp_path)
    assert "NO" not in said.values()
    # The library's own choice is another: without the file the bits differ.
    assert said["allreduce", "ring", 1024] == said["allreduce", "ring", 8188] == "yes"


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("written", (3, 5))
def test_rules_for_other_ranks_are_not_in_force(python, written, tmp_path):
    said = checked(python, 4, written, tmp_path)
    assert said["allreduce", "ring", 1024] == said["allreduce", "ring", 8188] == "NO"
