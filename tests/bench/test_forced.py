"""Files of rules for MPI libraries are in force, by the bits of real jobs."""

import pytest

from mpidist.bench.forced import InForce, SumBits
from mpidist.interchange.library_rules import MEASURED, LibraryRule
from tests.support.jobs import HERE, LIMIT, ROOT, each_mpi
from tests.support.processes import environment, run

RULE = LibraryRule("allreduce", 4, 8, 64, "ring", MEASURED, (1.5, 1.5))
FORCED = {"linear": 1, "ring": 2, "segmented_ring": 2, "tree": 3}


@pytest.mark.parametrize(
    ("within", "forced_within", "without", "said"),
    (
        (2, FORCED, 1, "yes"),
        (2, FORCED, 2, "same without"),
        (1, FORCED, 1, "NO"),
        # The file precedes what is forced.
        (2, dict.fromkeys(FORCED, 2), 1, "yes"),
        (1, dict.fromkeys(FORCED, 1), 1, "NO"),
        # An algorithm calls a collective that follows the file as well.
        (9, FORCED | {"ring": 9}, 1, "yes"),
    ),
)
def test_in_force_by_checksums(within, forced_within, without, said):
    found = InForce(SumBits(RULE, 8, within, forced_within), SumBits(RULE, 8, without, FORCED))
    assert str(found) == said and found.holds == (said != "NO")
    assert found.others == ([] if within == 9 else ["segmented_ring"])


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
