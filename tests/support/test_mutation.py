"""The prover and a run must say the same of every broken algorithm; `make mutation` tries more."""

import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import ScheduleError
from mpidist.schedule import COLLECTIVES, Copy, Recv, Send, algorithms, find, prove
from tests import mutation
from tests.mutation import Trial
from tests.support.how_long import STRESS


@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda a: a.label.replace(" ", "-"))
def test_prover_and_run_agree_on_mutants(algorithm):
    count = 300 if STRESS else 120
    tally = mutation.judge(algorithm, count)
    assert tally.disagreements == []
    assert tally.mutants == tally.rejected + tally.accepted == count
    assert tally.rejected > 2 * count / 3


SHARED = [a for a in algorithms(one_sided=True) if a.memory is not None]
SHARED += [find("allreduce", name).algorithm for name in mutation.MIXED]


@pytest.mark.parametrize("algorithm", SHARED, ids=lambda a: a.label.replace(" ", "-"))
def test_prover_and_runs_agree_on_mutants_in_shared_memory(algorithm):
    tally = mutation.judge_shared(algorithm, 50)
    assert tally.disagreements == [] and tally.unseen == []
    assert tally.mutants == tally.rejected + tally.accepted == 50
    assert tally.rejected > 25


def alltoall_through_tmp(rank, size):
    """Every block waits in tmp first, where it must find a place of its length."""
    yield Copy(rank, rank)
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        yield Send(to, to, "in"), Recv(source, source, "tmp")
    others = tuple(r for r in range(size) if r != rank)
    if others:
        yield Copy(others, others, "tmp", "out")


@pytest.mark.parametrize("size", range(1, 6))
def test_length_of_scratch_blocks(size):
    assert prove("alltoall", alltoall_through_tmp, size).messages == size * (size - 1)
    parts = [mutation.write_down(alltoall_through_tmp(r, size)) for r in range(size)]
    Trial(COLLECTIVES["alltoall"], size, 0, size, False).run(parts)


def test_copy_of_unequal_blocks():
    parts = [[(Copy((0, 1), (0,)),)], []]
    with pytest.raises(ScheduleError, match="copies 2 blocks to 1"):
        Trial(COLLECTIVES["alltoall"], 2, 0, 2, True).run(parts)
