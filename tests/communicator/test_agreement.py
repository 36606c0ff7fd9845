"""What ranks tell each other: results, errors of some, settings, and what rank 0 says."""

import pytest

from mpidist.communicator.agreement import answers, check_same, from_rank_0, on_all_ranks, text_of
from mpidist.errors import (
    CommunicationError,
    ConfigError,
    InvalidArgument,
    RankFailed,
    Unsupported,
)


def raises_on(comm, ranks, error):
    """A function that raises on some ranks, and returns ten times the rank on the others."""

    def act():
        if comm.rank in ranks:
            raise error
        return 10 * comm.rank

    return act


def test_on_all_ranks_returns_every_result(comm):
    assert on_all_ranks(comm, raises_on(comm, (), None), "x") == [10 * r for r in range(comm.size)]


@pytest.mark.mpi(min_size=2)
def test_on_all_ranks_an_error_is_raised_everywhere(comm):
    """Its own where it was raised; elsewhere with the ranks, their class and their text."""
    last = comm.size - 1
    error = ZeroDivisionError("a divisor")
    kind = ZeroDivisionError if comm.rank == last else InvalidArgument
    with pytest.raises(kind) as caught:
        on_all_ranks(comm, raises_on(comm, (last,), error), "Pipeline: schedule")
    if comm.rank == last:
        assert caught.value is error
    else:
        told = f"Pipeline: schedule fails on rank {last}: ZeroDivisionError: a divisor"
        assert str(caught.value) == told
    assert comm.allgather_object(comm.rank) == list(range(comm.size))  # still usable


@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=3)
def test_answers_equal_errors_are_told_once(comm):
    others = [rank for rank in range(comm.size) if rank != 1]
    found = answers(comm, raises_on(comm, others, OSError("full")))
    assert found.values == [10 if rank == 1 else None for rank in range(comm.size)]
    assert found.told() == f"on rank {', '.join(map(str, others))}: OSError: full"
    assert (found.own is None) == (comm.rank == 1) and found.lost is None


def test_answers_an_error_that_cannot_be_told_is_kept(comm):
    """What failed here says more than that the others are gone."""

    def lost(mine):
        raise RankFailed("rank 9 is gone")

    found = answers(comm, raises_on(comm, range(comm.size), OSError("full")), lost)
    told = f"on rank {comm.rank}: OSError: full; the other ranks could not be told: rank 9 is gone"
    assert str(found.own) == "full" and found.told() == told
    with pytest.raises(CommunicationError, match="rank 9"):
        answers(comm, raises_on(comm, (), None), lost)


def test_from_rank_0_calls_it_there_only(comm):
    called = []
    assert from_rank_0(comm, lambda: called.append(1) or comm.rank, "x") == 0
    assert comm.allgather_object(len(called)) == [1] + [0] * (comm.size - 1)


def test_from_rank_0_an_error_is_raised_everywhere(comm):
    """With its text if the caller knows the class, else with what failed."""
    for error, kind, told in (
        (ConfigError("a.toml: no table"), ConfigError, "^a.toml: no table$"),
        (Unsupported("3 ranks"), InvalidArgument, "^x fails on rank 0: Unsupported: 3 ranks$"),
        (InvalidArgument(""), InvalidArgument, "^$"),
    ):
        first = comm.rank == 0
        with pytest.raises(type(error) if first else kind, match=None if first else told):
            from_rank_0(comm, raises_on(comm, (0,), error), "x", kind)


def test_check_same_names_rank_setting_and_both_values():
    check_same("Pipeline", [{"chunks": 2, "cap": None}] * 3)
    every = [{"chunks": 2, "cap": None}, {"chunks": 2, "cap": "4"}]
    told = "Pipeline: rank 1 has cap='4' where rank 0 has None; expected the same on all ranks"
    with pytest.raises(ConfigError) as caught:
        check_same("Pipeline", every, ConfigError)
    assert str(caught.value) == told


def test_text_of_an_error_whose_text_raises():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    assert text_of(Odd()) == "Odd: its text cannot be had"
    assert text_of(ValueError("a\x1b[1m")) == r"ValueError: a\x1b[1m"
