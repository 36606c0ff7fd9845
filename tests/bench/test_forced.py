"""Files of rules for MPI libraries are in force, by the bits of real jobs."""

import pytest

from tests.support.jobs import HERE, LIMIT, ROOT, each_mpi
from tests.support.processes import environment, run


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("ranks", (4, 5))
def test_rules_are_in_force_by_the_bits(python, ranks, tmp_path):
    command = [python, str(HERE / "in_force_job.py"), str(tmp_path / "rules"), str(ranks)]
    done = run(command, LIMIT, environment(PYTHONPATH=str(ROOT)))
    assert done.status == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    said = {(c, name, int(nbytes)): word for c, name, nbytes, word in lines}
    assert len(said) == len(lines) == 8, done.output
    assert "NO" not in said.values()
    # The library's own choice is another: without the file the bits differ.
    assert said["allreduce", "ring", 1024] == said["allreduce", "ring", 8188] == "yes"
