"""Collectives of Python objects: what each rank gets, and errors that all ranks know."""

import operator

import numpy as np
import pytest

import mpidist
from mpidist import Communicator
from mpidist.errors import InvalidArgument, InvalidRank


class Unpicklable:
    def __getstate__(self):
        raise ZeroDivisionError("no state")


def mine(rank, to=None):
    """An object that only `rank` has (for rank `to`), of another length on each rank."""
    return {"from": rank, "to": to, "data": "ä" * rank, "array": np.arange(rank)}


def same(got, rank, to=None):
    expected = mine(rank, to)
    array = got.pop("array")
    assert got == {k: v for k, v in expected.items() if k != "array"}
    np.testing.assert_array_equal(array, expected["array"])


def check_moved(comm):
    rank, size = comm.rank, comm.size
    for root in range(size):
        gathered = comm.gather_object(mine(rank), root)
        assert (gathered is None) == (rank != root)
        for r, one in enumerate(gathered or ()):
            same(one, r)
        values = [mine(root, to) for to in range(size)]
        same(comm.scatter_object(values if rank == root else None, root), root, rank)
    received = comm.alltoall_object(mine(rank, to) for to in range(size))
    assert len(received) == size
    for r, one in enumerate(received):
        same(one, r, rank)


def check_reduced(comm):
    """In the order of the ranks, which concatenation keeps and subtraction needs."""
    rank, size = comm.rank, comm.size
    everyone = list(range(size))
    for root in range(size):
        got = comm.reduce_object([rank], operator.iadd, root)
        assert got == (everyone if rank == root else None)
    assert comm.allreduce_object([rank], operator.add) == everyone
    assert comm.allreduce_object(rank + 1, operator.sub) == 2 - size * (size + 1) // 2
    assert comm.allreduce_object({rank}, set.union) == set(everyone)
    assert comm.allreduce_object(str(rank), lambda a, b: f"({a}{b})").count("(") == size - 1


def test_every_rank_gets_its_objects(comm):
    check_moved(comm)


def test_reduction_by_a_function(comm):
    check_reduced(comm)


@pytest.mark.parametrize("nodes", [None, (0, 1, 0), (0, 1, 2)])
def test_simulated(nodes):
    for check in (check_moved, check_reduced):
        mpidist.run_simulated(3, check, **({} if nodes is None else {"nodes": nodes}))


def test_with_debug(comm):
    own = Communicator(comm.backend.split(0, comm.rank), debug=True)
    check_moved(own)
    check_reduced(own)
    own.free()


def refused(comm, text, culprit, call, *arguments):
    """The call raises InvalidArgument on every rank, and the communicator stays usable."""
    with pytest.raises(InvalidArgument, match=text) as raised:
        call(*arguments)
    assert (raised.value.__cause__ is not None) == (comm.rank == culprit)
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("culprit", [0, -1])
def test_what_cannot_be_pickled(comm, culprit):
    culprit %= comm.size
    here = comm.rank == culprit
    text = f"^rank {culprit}: value of type .*Unpicklable cannot be pickled: ZeroDivisionError"
    value = Unpicklable() if here else comm.rank
    values = [*range(comm.size - 1), value]
    refused(comm, text, culprit, comm.gather_object, value, 0)
    refused(comm, text, culprit, comm.alltoall_object, values)
    refused(comm, text, culprit, comm.scatter_object, values if here else None, culprit)
    refused(comm, text, culprit, comm.reduce_object, value, operator.add, 0)
    refused(comm, text, culprit, comm.allreduce_object, value, operator.add)
    with pytest.raises(InvalidArgument) as raised:
        comm.alltoall_object([Unpicklable()] * comm.size)
    assert str(raised.value).count("cannot be pickled") == comm.size


@pytest.mark.parametrize("culprit", [0, -1])
def test_not_one_object_for_each_rank(comm, culprit):
    culprit %= comm.size
    size, here = comm.size, comm.rank == culprit
    short = [0] * (size - 1 if here else size)
    text = f"^rank {culprit}: values has {size - 1} objects: expected {size}, one per rank"
    for call, more in ((comm.scatter_object, (culprit,)), (comm.alltoall_object, ())):
        with pytest.raises(InvalidArgument, match=text):
            call(short, *more)
    text = f"^rank {culprit}: values=7: expected a sequence of {size} objects"
    refused(comm, text, culprit, comm.alltoall_object, 7 if here else short)
    refused(comm, text, culprit, comm.scatter_object, 7, culprit)


@pytest.mark.mpi(min_size=2)
def test_a_function_that_raises(comm):
    """It runs on the root only; the others say so too."""

    def function(a, b):
        raise LookupError("no such thing")

    text = "function=function raised LookupError: no such thing"
    last = comm.size - 1
    refused(comm, f"^rank {last}: {text}", last, comm.reduce_object, 1, function, last)
    refused(comm, f"^rank 0: {text}", 0, comm.allreduce_object, 1, function)
    text = "^rank 0: value of type .* cannot be pickled"
    refused(comm, text, 0, comm.allreduce_object, 1, lambda a, b: Unpicklable())


def test_bad_arguments(comm):
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: function='sum': expected a func"):
        comm.allreduce_object(1, "sum")
    for call in (comm.gather_object, comm.scatter_object):
        with pytest.raises(InvalidRank, match=f"rank {comm.rank}: root={comm.size}"):
            call([1] * comm.size, comm.size)
    with pytest.raises(InvalidRank, match=f"rank {comm.rank}: root=-1"):
        comm.reduce_object(1, operator.add, -1)


@pytest.mark.mpi(min_size=2)
def test_different_calls_are_told(comm):
    own = Communicator(comm.backend.split(0, comm.rank), debug=True)
    with pytest.raises(mpidist.CollectiveMismatch, match="rank 0: broadcast"):
        if own.rank:
            own.gather_object(1)
        else:
            own.scatter_object([1] * own.size)
