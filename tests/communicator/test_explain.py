"""What explain() says of a call."""

import pytest

from mpidist.errors import InvalidArgument


def test_explain_leaves_out_ways(comm):
    """Of what "explain" chooses; training leaves out what may differ in bits between ranks."""
    every = ("native", "staged", "single_copy", "symmetric")
    for nbytes in (8, 64 << 10, 4 << 20, 64 << 20):
        assert comm.explain("allreduce", nbytes, without=every)[0].choice is not None
    with pytest.raises(InvalidArgument, match=r"without=\('ring',\): .*\bnative, "):
        comm.explain("allreduce", 8, without=("ring",))
