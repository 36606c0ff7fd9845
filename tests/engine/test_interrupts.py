"""Ranks that are stopped or interrupted in the middle of an operation."""

import pytest

from tests.support.jobs import each_mpi, job, no_memory_left_behind, said


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("how", ["symmetric", "staged", "single_copy", "ring"])
def test_short_stop_of_a_rank(python, how):
    """Rank 1 is stopped in a sum until rank 0 sees it, within the deadline of 600 s: no error."""
    finished = job(python, 3, "stopped_for_a_while", how)
    assert said(finished, "usable") == [0, 1, 2] and finished.status == 0, finished.output


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("how", ["symmetric", "staged", "single_copy"])
def test_long_stop_of_a_rank(python, how):
    """Rank 1 is stopped in a sum until rank 0 is past the deadline of 3 s: it names rank 1."""
    finished = job(python, 2, "stopped_for_too_long", how)
    assert said(finished, "named") == [0, 1], finished.output


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("how", ["symmetric", "staged", "single_copy"])
def test_a_rank_that_is_interrupted(python, how):
    """Rank 1 ends by a Ctrl-C in a sum; that ends the job, long before the deadline of 600 s."""
    with no_memory_left_behind():
        finished = job(python, 3, "interrupted", how)
    assert said(finished, "named") == [1] and said(finished, "went on") == [], finished.output
    assert finished.status
    assert "ended with KeyboardInterrupt" in finished.output


@pytest.mark.long
@each_mpi
@pytest.mark.parametrize("how", ["symmetric", "staged", "single_copy"])
def test_interrupt_on_another_communicator(python, how):
    """As above, but of a communicator by split(): the others name rank 1, and do not wait 600 s."""
    finished = job(python, 3, "interrupted_elsewhere", how)
    assert said(finished, "named") == [0, 1, 2] and finished.status, finished.output


@pytest.mark.long
@each_mpi
def test_a_rank_that_is_interrupted_and_stays(python):
    """Rank 1 catches its Ctrl-C in a sum: the others name it at the deadline of 3 s."""
    finished = job(python, 3, "interrupted_and_stays", "symmetric")
    assert said(finished, "usable") == [0, 1, 2], finished.output
