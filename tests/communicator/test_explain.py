"""What explain() says of a call."""

import pytest

from mpidist.calls.prepare import Caller
from mpidist.communicator.explain import example_call
from mpidist.errors import InvalidArgument, UnknownName
from mpidist.operations import find_op


def test_explain_leaves_out_ways(comm):
    """Of what "explain" chooses; training leaves out what may differ in bits between ranks."""
    every = ("native", "staged", "single_copy", "symmetric")
    for nbytes in (8, 64 << 10, 4 << 20, 64 << 20):
        assert comm.explain("allreduce", nbytes, without=every)[0].choice is not None
    with pytest.raises(InvalidArgument, match=r"without=\('ring',\): .*\bnative, "):
        comm.explain("allreduce", 8, without=("ring",))


def test_example_call_has_lengths_but_no_memory():
    """120 bytes are 30 of float32: 10 from each of 3 ranks."""
    call = example_call(Caller(1, 3), "allgather", 120, find_op("sum"))
    assert call.nbytes == 120 and call.counts == (10, 10, 10)
    assert call.x.shape == (10,) and call.out.shape == (30,)
    assert call.x.strides == call.out.strides == (0,)  # one element, again and again
    root, other = (example_call(Caller(r, 3), "scatter", 120, find_op("sum")) for r in (0, 1))
    assert root.x.shape == (30,) and root.out.shape == (10,)
    assert other.x is None and other.out.shape == (10,)
    barrier = example_call(Caller(1, 3), "barrier", 120, find_op("sum"))
    assert barrier.x.size == barrier.out.size == barrier.nbytes == 0


def test_example_call_of_no_collective_and_of_an_undefined_mean():
    with pytest.raises(UnknownName, match="'allreduse'.*'allreduce'"):
        example_call(Caller(1, 3), "allreduse", 8, find_op("sum"))
    with pytest.raises(InvalidArgument, match="rank 1: op='mean': scan"):
        example_call(Caller(1, 3), "scan", 8, find_op("mean"))
