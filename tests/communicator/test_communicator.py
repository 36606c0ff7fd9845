"""Collectives by every algorithm, and names that other libraries have."""

import numpy as np
import pytest

import mpidist
from tests.support import collectives as cases


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Get_rank", "it is rank here"),
        ("Allreduce", "it is allreduce here"),
        ("all_reduce", "it is allreduce here"),
        ("Ibcast", "it is ibroadcast here"),
        ("bcast", "broadcast_object"),
        ("world_size", "it is size here"),
    ],
)
def test_names_of_other_libraries(name, hint):
    (said,) = mpidist.run_simulated(
        1, lambda comm: pytest.raises(AttributeError, getattr, comm, name)
    )
    assert repr(name) in str(said.value) and hint in str(said.value)


def test_unknown_attribute():
    (there,) = mpidist.run_simulated(1, lambda comm: (hasattr(comm, "no"), hasattr(comm, "_no")))
    assert there == (False, False)


def test_ops_of_other_libraries():
    with pytest.raises(mpidist.InvalidArgument, match="unknown op 'avg'.*'mean'"):
        mpidist.run_simulated(1, lambda comm: comm.allreduce(np.ones(1), "avg"))


@pytest.mark.ranks(1, 2, 3, 4, 5, 8)
@pytest.mark.parametrize(("collective", "name"), cases.WITHOUT_NATIVE)
def test_collective_of_any_length_and_in_place(comm, collective, name):
    cases.check_lengths(comm, collective, name)
