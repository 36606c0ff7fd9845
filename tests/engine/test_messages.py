"""Messages between ranks: arrays and objects, tags, order, what does not fit."""

import datetime
import decimal
import fractions
import time

import numpy as np
import pytest

from mpidist.communicator.layers import max_tag
from mpidist.errors import (
    CollectiveTimeout,
    CommunicatorBroken,
    InvalidArgument,
    InvalidRank,
    MessageMismatch,
)
from tests.support.messages import (
    EDGE,
    FIELDS,
    OTHER,
    RECEIVE,
    beside,
    both_ways,
    done,
    lengths_that_differ,
    refused,
    short_and_long_in_order,
    stay_away,
)

ALIKE = [((), (1,)), ((1, 6), (6,)), ((2, 1, 3), (2, 3)), ((1,) * 5, ()), ((0, 3), (0, 3))]
FORMS = [  # sent, and expected: dtype, shape
    (("f4", (2,)), ("f8", (1,))),
    (("f8", (1,)), ("f4", (2,))),
    (("i8", (3,)), ("f8", (3,))),
    (("<i4", (3,)), (">i4", (3,))),
    (("f8", (2, 3)), ("f8", (3, 2))),
    (("f8", (6,)), ("f8", (2, 3))),
    (("f8", (3_000, 2)), ("f8", (2, 3_000))),
    (("u1", (8,)), ("f8", ())),
    ((FIELDS, (2,)), (OTHER, (2,))),
]


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
@pytest.mark.parametrize("receive", RECEIVE)
def test_message_of_another_length_is_refused(comm, receive):
    lengths_that_differ(comm, receive)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("receive", RECEIVE)
def test_message_of_another_dtype_or_shape_is_refused(comm, receive):
    """Dtypes and shapes that differ in equally many bytes."""
    for sent, expected in FORMS:
        refused(comm, sent, expected, RECEIVE[receive])


@pytest.mark.mpi(min_size=2)
def test_message_axes_of_length_1_do_not_count(comm):
    """Axes of length 1 do not count."""
    for sent, expected in ALIKE:
        if comm.rank == 0:
            comm.send(np.ones(sent), 1)
        elif comm.rank == 1:
            assert (comm.recv(np.zeros(expected), 0) == 1).all()
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_messages_short_and_long_come_in_order(comm):
    short_and_long_in_order(comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_messages_both_ways_at_once(comm, algorithm):
    both_ways(comm, algorithm)


@pytest.mark.mpi(min_size=2)
def test_dropped_messages_are_taken(comm):
    """What was begun and dropped goes on, and is taken; an error of it is nobody's."""
    if comm.rank == 0:
        works = [comm.isend(np.ones(n), 1, 6) for n in (3, 100_000, 4, 90_000)]
    elif comm.rank == 1:
        room = [np.zeros(n) for n in (3, 100_000, 5, 90_001)]
        for out in room:
            comm.irecv(out, 0, 6)
    assert comm.allreduce(1) == comm.size
    if comm.rank == 0:
        for work in works:
            work.wait()
        comm.recv(np.empty(1), 1, 7)
        time.sleep(0.2)  # rank 1 waits, and takes meanwhile what was dropped
        comm.send(np.ones(90_000), 1, 6)
    elif comm.rank == 1:
        comm.send(np.ones(1), 0, 7)
        assert (comm.recv(np.empty(90_000), 0, 6) == 1).all()
        assert [int(out.sum()) for out in room] == [3, 100_000, 0, 0]
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_recv_from_any_rank(comm):
    """Rank 0 receives from whoever sends: short and long messages, and is told who it was."""
    sizes = (3, 70_000)
    if comm.rank:
        for n in sizes:
            comm.send(np.full(n, float(comm.rank)), 0, 6)
            comm.barrier()
    else:
        others = set(range(1, comm.size))
        for n in sizes:  # the messages of one rank keep their order
            found = {}
            for _ in others:
                work = comm.irecv(np.empty(n), None, 6)
                with pytest.raises(RuntimeError, match="pending"):
                    _ = work.source
                got = work.wait()
                found[work.source] = got
            assert set(found) == others
            assert all((got == source).all() for source, got in found.items())
            comm.barrier()
    assert comm.isend(np.ones(2), 0, 8).wait() is None if comm.rank == 1 else True
    if comm.rank == 0:
        assert (comm.recv(np.empty(2), None, 8) == 1).all()
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_recv_from_any_rank_names_the_sender_of_what_does_not_fit(comm):
    """What does not fit is dropped, and the error says who sent it."""
    if comm.rank == 1:
        comm.send(np.ones(70_000), 0, 6)
        comm.send(np.full(3, 8.0), 0, 6)
    elif comm.rank == 0:
        with pytest.raises(MessageMismatch) as caught:
            comm.recv(np.empty(5), None, 6)
        assert caught.value.sender == 1
        assert (comm.recv(np.empty(3), None, 6) == 8).all()
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_iprobe_leaves_what_has_arrived(comm):
    """A probe sees what has arrived of one kind and tag, and leaves it there."""
    comm.barrier()
    if comm.rank == 1:
        comm.send(np.ones(3), 0, 5)
        comm.send_object("text", 0, 5)
    comm.barrier()
    if comm.rank == 0:
        assert comm.iprobe(None, 4) is None
        for kind in ("array", "object"):
            until = time.monotonic() + 90
            while comm.iprobe(None, 5, kind) is None and time.monotonic() < until:
                time.sleep(0.001)
            assert comm.iprobe(None, 5, kind) == comm.iprobe(1, 5, kind) == 1
        assert (comm.recv(np.empty(3), None, 5) == 1).all() and comm.recv_object(None, 5) == "text"
        assert comm.iprobe(None, 5) is comm.iprobe(None, 5, "object") is None
        with pytest.raises(InvalidArgument, match="rank 0: kind='bytes'"):
            comm.iprobe(None, 5, "bytes")
        assert comm.iprobe(0, 5) is None
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_create_group_is_of_its_members_alone(comm):
    """A communicator of some ranks, made by these alone, in the order given."""
    members = [comm.size - 1, *range(0, comm.size - 1, 2)]
    if comm.rank in members:
        for made in range(2):
            sub = comm.create_group(members, tag=made)
            assert (sub.rank, sub.size) == (members.index(comm.rank), len(members))
            assert sub.allgather(comm.rank).tolist() == members
            assert sub.timeout == comm.timeout
            sub.free()
    if comm.rank == 0:
        for wrong in ([0, 0], [1], []):
            with pytest.raises(InvalidArgument, match="rank 0: create_group: ranks="):
                comm.create_group(wrong)
        with pytest.raises(InvalidRank, match="99"):
            comm.create_group([0, 99])
    assert comm.allreduce(1) == comm.size


@pytest.mark.ranks(1, 2, 3)
def test_messages_to_oneself(comm):
    """In any order, short and long, also to a receive from any rank; the blocking ones refuse."""
    for count in (3, EDGE + 1):
        x = np.full(count, comm.rank + 1.0)
        out = np.zeros(count)
        works = [comm.irecv(out, comm.rank, 3), comm.isend(x, comm.rank, 3)]
        assert [work.wait() is out for work in works][0] and (out == x).all()
        work, out = comm.isend(x, comm.rank), np.zeros(count)
        while comm.iprobe(comm.rank) is None:
            pass
        came = comm.irecv(out, None)
        came.wait(), work.wait()
        assert came.source == comm.rank and (out == x).all()
    for blocking in (lambda: comm.send(x, comm.rank), lambda: comm.recv(out, comm.rank)):
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: .*itself: .*isend\(\)"):
            blocking()


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.mpi(min_size=2)
def test_late_message_breaks_the_communicator(comm):
    """What a message broke is polled for no more, and ranks that come later are told."""
    sub, big = beside(comm), np.zeros(50_000)
    if sub.rank == 0:
        pending = sub.irecv(np.empty(1), 1, 9)  # a communicator that works would have it polled
        late = sub.irecv(np.empty(3), 1, 5)
        with pytest.raises(CollectiveTimeout, match="recv from rank 1 not finished within 0.2 s"):
            late.wait(timeout=0.2)
        assert sub.broken.startswith(
            "the communicator is broken since recv from rank 1 ended with CollectiveTimeout: rank 0"
        )
        assert not sub._service.sequencer.engine.active and not pending.test()
        with pytest.raises(CommunicatorBroken, match="since recv from rank 1 ended"):
            sub.allreduce(big, algorithm="ring")
        for rank in range(1, comm.size):
            done(comm, rank)
    else:
        # Simulated ranks do not: one that waited would be seen to do so in vain.
        early = sub.rank > 1 and comm.backend.native is not None
        if not early:
            stay_away(comm, [0])
        words = "allreduce.*cannot complete: rank 0 has failed before this operation"
        began = time.monotonic()
        with pytest.raises(CommunicatorBroken, match=words):
            sub.allreduce(big, algorithm="ring")
        assert time.monotonic() - began < sub.timeout / 2
        if early:
            stay_away(comm, [0])
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_messages_of_many_shapes_go_around_the_ring(comm):
    right, left = ring(comm)
    for shape in ((), (0,), (1,), (3, 5), (100_003,)):
        for dtype in ("f4", "i8", "bool", ">f8", "S5"):
            x = np.full(shape, comm.rank).astype(dtype)
            work = comm.irecv(np.zeros(shape, dtype), left)
            comm.send(x, right)
            got = work.wait()
            assert got.shape == shape and (got == np.full(shape, left).astype(dtype)).all()


@pytest.mark.mpi(min_size=2)
def test_messages_of_a_tag_keep_their_order(comm):
    """Messages of one tag keep their order; others can be taken first."""
    right, left = ring(comm)
    works = [comm.isend(np.array([10 * tag + k]), right, tag) for k in range(3) for tag in range(4)]
    for tag in (3, 0, 2, 1):
        for k in range(3):
            assert comm.recv(np.empty(1, int), left, tag) == 10 * tag + k
    for work in works:
        assert work.wait() is None


@pytest.mark.mpi(min_size=2)
def test_tag_above_the_largest_is_refused(comm):
    right, left = ring(comm)
    last = max_tag(comm)
    work = comm.irecv(np.empty(1), left, last)
    comm.send(1.5, right, last)
    assert work.wait() == 1.5
    with pytest.raises(InvalidArgument, match=f"tag={last + 1}: expected 0 … {last}"):
        comm.send(1.5, right, last + 1)


@pytest.mark.mpi(min_size=2)
def test_recv_into_memory_with_gaps(comm):
    right, left = ring(comm)
    out = np.zeros((4, 6))
    work = comm.irecv(out[::2, ::3], left)
    comm.send((np.arange(4.0).reshape(2, 2) + comm.rank).T, right)
    assert work.wait().base is out
    np.testing.assert_array_equal(out[::2, ::3], np.arange(4.0).reshape(2, 2).T + left)
    assert not out[1::2].any() and not out[:, 1].any()


def test_objects_arrive_alike(comm):
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


def test_objects_of_different_size_are_gathered(comm):
    everyone = comm.allgather_object("x" * (comm.rank * 1000))
    assert [len(v) for v in everyone] == [1000 * r for r in range(comm.size)]


def test_large_objects_both_ways(comm):
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
def test_objects_that_cannot_be_pickled_are_named(comm, value, why, culprit):
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


def test_wrong_peers_are_refused(comm):
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
def test_wrong_tags_and_arrays_are_refused(comm):
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
