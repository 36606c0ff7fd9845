"""Messages between two ranks: arrays and objects, tags, order, sizes."""

import datetime
import decimal
import fractions
import gc
import time

import numpy as np
import pytest
from mpi4py import MPI

from mpidist import Communicator
from mpidist.backends.mpi import MpiBackend
from mpidist.communicator.layers import max_tag
from mpidist.engine import messages
from mpidist.errors import InvalidArgument, InvalidRank
from tests.support import message_cases as cases

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
    last = max_tag(comm)
    work = comm.irecv(np.empty(1), left, last)
    comm.send(1.5, right, last)
    assert work.wait() == 1.5
    with pytest.raises(InvalidArgument, match=f"tag={last + 1}: expected 0 … {last}"):
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


class NoState:
    def __getstate__(self):
        raise ZeroDivisionError("no state")


@pytest.mark.parametrize("culprit", [0, -1])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: 0, r"value of type function cannot be pickled: \w+: .*<lambda>"),
        (NoState(), r"value of type .*\.NoState cannot be pickled: ZeroDivisionError: no state"),
    ],
)
def test_what_cannot_be_pickled(comm, value, why, culprit):
    """All ranks name the rank, the type and pickle's error, and the communicator stays usable."""
    culprit %= comm.size
    mine = value if comm.rank == culprit else comm.rank
    with pytest.raises(InvalidArgument, match=f"^rank {culprit}: {why}"):
        comm.broadcast_object(mine, root=culprit)
    with pytest.raises(InvalidArgument, match=f"^rank {culprit}: {why}") as raised:
        comm.allgather_object(mine)
    assert (raised.value.__cause__ is not None) == (comm.rank == culprit)
    with pytest.raises(InvalidArgument) as raised:
        comm.allgather_object(value)
    assert str(raised.value).count("cannot be pickled") == comm.size
    if comm.size > 1:
        with pytest.raises(InvalidArgument, match=f"^rank {comm.rank}: {why}"):
            comm.send_object(value, ring(comm)[0])
    assert comm.allgather_object(comm.rank) == list(range(comm.size))


def test_bad_peers(comm):
    p, rank = comm.size, comm.rank
    x = np.ones(3)
    for peer in (p, -1, 1.0, None, True, "0"):
        with pytest.raises(InvalidRank, match=f"rank {rank}: peer=.*expected 0 … {p - 1}"):
            comm.send(x, peer)
        if peer is not None:  # which is any rank, to a receive
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


@pytest.fixture
def pair(comm):
    """The communicator, if it has a rank that can send to another."""
    if comm.size < 2:
        pytest.skip("needs at least 2 ranks")
    return comm


@pytest.mark.parametrize("receive", cases.RECEIVE)
def test_lengths_that_differ(pair, receive):
    cases.check_lengths(pair, receive)


@pytest.mark.parametrize("receive", cases.RECEIVE)
def test_dtypes_and_shapes_that_differ(pair, receive):
    cases.check_forms(pair, receive)


def test_axes_of_length_1(pair):
    cases.check_alike(pair)


def test_order_of_short_and_long(pair):
    cases.check_order(pair)


@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
def test_both_ways_at_once(pair, algorithm):
    cases.check_both_ways(pair, algorithm)


def test_dropped(pair):
    cases.check_dropped(pair)


@pytest.mark.parametrize("case", cases.POSTED)
def test_posted(pair, case):
    cases.POSTED[case](pair)


def test_posted_refusals(comm):
    cases.check_posted_refusals(comm)


def test_messages_to_oneself(comm):
    cases.check_messages_to_oneself(comm)


def test_posted_after_free(comm):
    cases.check_freed(comm)


def test_posted_and_dropped(pair):
    """Memory of a posted message that nobody holds any more is kept until the message has come."""
    sub = cases.beside(pair)
    if sub.rank == 0:
        sub.post_recv(np.empty(300_000), 1)
        gc.collect()
        filled = [np.full(300_000, 7.0) for _ in range(4)]
    sub.barrier()
    if sub.rank == 1:
        sub.post_send(np.ones(300_000), 0).wait()
    sub.barrier()
    if sub.rank == 0:
        time.sleep(0.1)
        sub.barrier()
        assert all((x == 7).all() for x in filled)
    else:
        sub.barrier()
    sub.free()


@pytest.mark.parametrize("nodes", ["one", "many"])
def test_messages_never_received_end_with_free(pair, nodes):
    """Nothing sent on a freed communicator arrives on the next one, whose MPI handle may be equal.

    Posted messages, and what ranks tell those of other nodes.
    """
    hosts = [0] * pair.size if nodes == "one" else range(pair.size)
    right, left = ring(pair)

    def make():
        return Communicator(MpiBackend(pair.backend.comm, hosts), pair.config)

    for turn in range(3):
        sub, stray = make(), np.full(300_000, -1.0)
        for length in (1, 2_000, 300_000):
            sub.post_send(stray[:length], right, 3)
        if nodes == "many":
            sub.backend.roll_call.tell(1, 1, "stray")
        sub.free()
        bare = [pair.backend.comm.Dup() for _ in range(4)]
        pair.barrier()
        arrived = [made.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for made in bare]
        pair.barrier()
        for made in bare:
            made.Free()
        assert not any(arrived)
        sub, out = make(), np.empty(1)
        posted = sub.post_recv(out, left, 3)
        sub.post_send(np.full(1, 10.0 * turn + pair.rank), right, 3)
        posted.wait()
        assert out == 10 * turn + left
        work = sub.irecv(np.empty(1), left, 3)
        sub.send(np.full(1, 20.0 * turn + pair.rank), right, 3)
        assert work.wait() == 20 * turn + left
        assert sub.allgather_object(turn) == [turn] * pair.size
        sub.free()


def test_pieces(pair, monkeypatch):
    """Whatever is longer than a piece goes in several, on every path: here a piece is short."""
    monkeypatch.setattr(messages, "CHUNK_BYTES", 10_000)
    backend = MpiBackend(pair.backend.comm)
    backend.piece_bytes = 1_000
    sub = Communicator(backend, pair.config)
    cases.check_posted(sub)
    cases.check_lengths(sub, "recv")
    cases.check_both_ways(sub, "ring")
    value = [np.full(30_001, 3.0), "text"]
    if sub.rank == 0:
        sub.send_object(value, 1)
    elif sub.rank == 1:
        assert sub.recv_object(0)[0].sum() == 90_003
    assert sub.broadcast_object(value if sub.rank == 0 else None)[1] == "text"
    assert [len(v) for v in sub.allgather_object(b"x" * (7_000 * sub.rank))] == [
        7_000 * r for r in range(sub.size)
    ]
    for dtype in ("u1", "f8", "S3"):
        x = np.zeros(9_999, dtype)
        for turn in range(4):  # posted one by one, then as persistent requests
            x[:] = str(turn + 1) if sub.rank == 0 else "0"
            sub.broadcast(x, algorithm="binomial")
            assert (x == np.full(1, str(turn + 1)).astype(dtype)).all()
            x[:] = str(turn) if sub.rank == 0 else "0"
            sub.ibroadcast(x, algorithm="linear").wait()
            assert (x == np.full(1, str(turn)).astype(dtype)).all()
    for _ in range(3):
        total = sub.allreduce(np.ones(10_001), algorithm="ring")
        assert (total == sub.size).all()
    sub.free()


HUGE = 2_200_000_000


def free_memory():
    """Give the bytes of memory that are free on this machine."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if "MemAvailable" in line) * 1024


@pytest.fixture(scope="module")
def huge():
    """Make an array of 2.2 GB once: the first touch of its memory takes longer than sending it."""
    made = []
    yield lambda: made[0] if made else made.append(np.empty(HUGE, "u1")) or made[0]
    made.clear()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["array", "object", "messages", "background", "auto", "symmetric"])
def test_more_than_two_gigabytes(comm, path, request, huge):
    """uint8 of 2.2 GB; see test_pieces for what is cut, at any size."""
    if comm.size != 2:
        pytest.skip("needs exactly 2 ranks")
    here, needed = comm.broadcast_object(free_memory()), 6 * HUGE
    if here < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free memory: there are {here >> 30}")
    comm.timeout, before = 200.0, comm.timeout
    request.addfinalizer(lambda: setattr(comm, "timeout", before))
    at = [0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**31 + 1, HUGE - 1]
    x = comm.empty(HUGE, "u1") if path == "symmetric" else huge()
    x[:] = 7 if comm.rank == 0 else 0
    if path == "array":
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
    elif path == "object":
        got = comm.send_object(x, 1) if comm.rank == 0 else comm.recv_object(0)
        x = x if comm.rank == 0 else got
    elif path == "background":
        comm.ibroadcast(x, algorithm="binomial").wait()
    else:
        for turn in range(3 if path == "messages" else 1):  # the third time with persistent ones
            x[:] = 7 if comm.rank == 0 else turn
            comm.broadcast(x, algorithm="binomial" if path == "messages" else "auto")
    assert (x[at] == 7).all()
    if path == "auto":
        comm.allreduce(x, "max", out=x)
        assert (x[at] == 7).all()
    if path == "symmetric":
        comm.free(x)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "case",
    [
        cases.check_any,
        cases.check_any_mismatch,
        cases.check_probe,
        cases.check_group,
        cases.check_group_deadline,
    ],
    ids=lambda case: case.__name__,
)
def test_any_rank(comm, case):
    case(comm)
