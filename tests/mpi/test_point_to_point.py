"""Messages between two ranks: arrays and objects, tags, order, sizes."""

import datetime
import decimal
import fractions

import numpy as np
import pytest

from mpidist.errors import InvalidArgument, InvalidRank

OBJECTS = [
    None,
    0,
    -(10**100),
    1.5 + 2j,
    "schön",
    b"",
    bytes(range(256)),
    [],
    {"a": [1, {2, 3}], (4,): None},
    datetime.date(2024, 2, 29),
    decimal.Decimal("0.1"),
    fractions.Fraction(1, 3),
    range(5),
    np.arange(6).reshape(2, 3),
    np.float32(0.5),
    ValueError("told", 3),
]


def alike(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Exception):
        return type(a) is type(b) and a.args == b.args
    return a == b and type(a) is type(b)


def ring(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.mark.mpi(min_size=2)
def test_round_the_ring(comm):
    right, left = ring(comm)
    for shape in ((), (0,), (1,), (3, 5), (100_003,)):
        for dtype in ("f4", "i8", "bool", ">f8", "S5"):
            x = np.full(shape, comm.rank).astype(dtype)
            work = comm.irecv(np.zeros(shape, dtype), left)
            comm.send(x, right)
            got = work.wait()
            assert got.shape == shape and (got == np.full(shape, left).astype(dtype)).all()


@pytest.mark.mpi(min_size=2)
def test_order_and_tags(comm):
    """Messages of one tag keep their order; others can be taken first."""
    right, left = ring(comm)
    works = [comm.isend(np.array([10 * tag + k]), right, tag) for k in range(3) for tag in range(4)]
    for tag in (3, 0, 2, 1):
        for k in range(3):
            assert comm.recv(np.empty(1, int), left, tag) == 10 * tag + k
    for work in works:
        assert work.wait() is None


@pytest.mark.mpi(min_size=2)
def test_largest_tag(comm):
    right, left = ring(comm)
    last = comm._messages._width - 1
    work = comm.irecv(np.empty(1), left, last)
    comm.send(1.5, right, last)
    assert work.wait() == 1.5
    with pytest.raises(InvalidArgument, match=f"tag={last + 1}: allowed are 0 … {last}"):
        comm.send(1.5, right, last + 1)


@pytest.mark.mpi(min_size=2)
def test_not_contiguous(comm):
    right, left = ring(comm)
    out = np.zeros((4, 6))
    work = comm.irecv(out[::2, ::3], left)
    comm.send((np.arange(4.0).reshape(2, 2) + comm.rank).T, right)
    assert work.wait().base is out
    np.testing.assert_array_equal(out[::2, ::3], np.arange(4.0).reshape(2, 2).T + left)
    assert not out[1::2].any() and not out[:, 1].any()


def test_objects(comm):
    right, left = ring(comm)
    for turn, value in enumerate(OBJECTS):
        root = turn % comm.size
        assert alike(comm.broadcast_object(value if comm.rank == root else 7, root), value)
        everyone = comm.allgather_object((comm.rank, value))
        assert [r for r, _ in everyone] == list(range(comm.size))
        assert all(alike(v, value) for _, v in everyone)
    if comm.size > 1 and comm.rank < 2:
        for value in OBJECTS:
            if comm.rank == 0:
                comm.send_object(value, 1, 3)
            else:
                assert alike(comm.recv_object(0, 3), value)


def test_objects_of_different_size(comm):
    everyone = comm.allgather_object("x" * (comm.rank * 1000))
    assert [len(v) for v in everyone] == [1000 * r for r in range(comm.size)]


def test_large_objects(comm):
    """Larger than any buffer that a library keeps for messages: both sides at once."""
    big = {"weights": np.arange(700_000.0) + comm.rank}
    got = comm.broadcast_object(big if comm.rank == comm.size - 1 else None, comm.size - 1)
    assert got["weights"][0] == comm.size - 1
    if comm.size > 1 and comm.rank < 2:
        if comm.rank == 0:
            comm.send_object(big, 1)
            assert comm.recv_object(1)["weights"][0] == 1
        else:
            assert comm.recv_object(0)["weights"][0] == 0
            comm.send_object(big, 0)


@pytest.mark.mpi(min_size=2)
def test_objects_and_arrays_do_not_mix(comm):
    right, left = ring(comm)
    first = comm.isend(np.full(4, 5.0), right, 1)
    barrier = comm.ibarrier()
    comm.isend([9.0], right, 2).wait()
    if comm.rank == 0:
        comm.send_object("object", right, 1)
    if comm.rank == 1:
        assert comm.recv_object(0, 1) == "object"
    assert (comm.recv(np.empty(4), left, 1) == 5).all()
    assert comm.recv(np.empty(1), left, 2) == 9
    first.wait()
    barrier.wait()


def test_what_cannot_be_pickled(comm):
    for call in (comm.broadcast_object, comm.allgather_object):
        with pytest.raises(InvalidArgument, match="pickled"):
            call(lambda: 0)
    if comm.size > 1:
        with pytest.raises(InvalidArgument, match="pickled"):
            comm.send_object(lambda: 0, ring(comm)[0])
    assert comm.allreduce(1) == comm.size


def test_bad_peers(comm):
    p, rank = comm.size, comm.rank
    x = np.ones(3)
    for peer in (p, -1, 1.0, None, True, "0"):
        with pytest.raises(InvalidRank, match=f"rank {rank}: peer=.*allowed are 0 … {p - 1}"):
            comm.send(x, peer)
        with pytest.raises(InvalidRank):
            comm.recv_object(peer)
    with pytest.raises(InvalidArgument, match="this rank itself"):
        comm.send(x, rank)


@pytest.mark.mpi(min_size=2)
def test_bad_tags_and_arrays(comm):
    x, other = np.ones(3), ring(comm)[0]
    for tag in (-1, 1.5, "a", True):
        with pytest.raises(InvalidArgument, match="tag="):
            comm.send(x, other, tag)
    frozen = np.ones(3)
    frozen.flags.writeable = False
    for out, why in ((frozen, "read-only"), ([1.0], "numpy array"), (None, "numpy array")):
        with pytest.raises(InvalidArgument, match=why):
            comm.recv(out, other)
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("culprit", [0, -1])
def test_an_object_that_cannot_be_pickled_on_one_rank_raises_on_all(comm, culprit):
    culprit %= comm.size
    value = (lambda: 1) if comm.rank == culprit else comm.rank
    with pytest.raises(InvalidArgument, match="pickle"):
        comm.broadcast_object(value, root=culprit)
    with pytest.raises(InvalidArgument, match="pickle"):
        comm.allgather_object(value)
    assert comm.allgather_object(comm.rank) == list(range(comm.size))
