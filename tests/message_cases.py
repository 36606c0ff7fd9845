"""Messages that fit their receiver's array, and those that do not: functions of a communicator."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpidist.engine.messages import INLINE_BYTES
from mpidist.errors import CollectiveMismatch, MessageMismatch

# Elements sent and expected: shorter and longer, within a short message and beyond one.
LENGTHS = [(600, 4), (4, 600), (500_000, 4), (4, 500_000), (3_000, 2_000), (0, 1), (1, 0)]
EDGE = INLINE_BYTES // 8
LENGTHS += [(EDGE, EDGE + 1), (EDGE + 1, EDGE)]
FIELDS = np.dtype([(f"field{k:03}", "f4") for k in range(60)])
OTHER = np.dtype([(f"field{k:03}", "f4" if k < 59 else "i4") for k in range(60)])
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
ALIKE = [((), (1,)), ((1, 6), (6,)), ((2, 1, 3), (2, 3)), ((1,) * 5, ()), ((0, 3), (0, 3))]


def name(form):
    """Give dtype and shape as errors have them."""
    dtype, shape = form
    return f"{np.dtype(dtype)} {tuple(n for n in shape if n != 1)}"


def refused(comm, sent, expected, receive, tag=3):
    """Rank 0 sends what rank 1 cannot take: it says so, and writes nothing; the next one comes."""
    if comm.rank == 0:
        comm.send(np.ones(sent[1], sent[0]), 1, tag)
        comm.send(np.full(5, 8.0), 1, tag)
    elif comm.rank == 1:
        dtype, shape = np.dtype(expected[0]), expected[1]
        nbytes = dtype.itemsize * int(np.prod(shape))
        memory = np.full(nbytes + 10_000, 77, np.uint8)
        out = memory[:nbytes].view(dtype).reshape(shape)
        with pytest.raises(MessageMismatch) as caught:
            receive(comm, out, 0, tag)
        error = caught.value
        assert (error.sender, error.tag) == (0, tag) and isinstance(error, CollectiveMismatch)
        assert str(error).startswith("rank 1: rank 0 sent")
        if dtype != OTHER:
            assert (error.sent, error.expected) == (name(sent), name(expected))
        assert (memory == 77).all()
        assert (receive(comm, np.empty(5), 0, tag) == 8).all()
    assert comm.allreduce(1) == comm.size


def blocking(comm, out, peer, tag):
    """Receive, blocking."""
    return comm.recv(out, peer, tag)


def background(comm, out, peer, tag):
    """Receive in the background."""
    work = comm.irecv(out, peer, tag)
    try:
        return work.wait()
    except MessageMismatch as error:
        with pytest.raises(MessageMismatch) as again:
            work.wait()
        assert again.value is error
        raise


RECEIVE = {"recv": blocking, "irecv": background}


def check_lengths(comm, receive):
    """Every pair of lengths that differ."""
    for sent, expected in LENGTHS:
        refused(comm, ("f8", (sent,)), ("f8", (expected,)), RECEIVE[receive])


def check_forms(comm, receive):
    """Dtypes and shapes that differ in equally many bytes."""
    for sent, expected in FORMS:
        refused(comm, sent, expected, RECEIVE[receive])


def check_alike(comm):
    """Axes of length 1 do not count."""
    for sent, expected in ALIKE:
        if comm.rank == 0:
            comm.send(np.ones(sent), 1)
        elif comm.rank == 1:
            assert (comm.recv(np.zeros(expected), 0) == 1).all()
    assert comm.allreduce(1) == comm.size


def check_order(comm):
    """Short and long messages of one tag come in the order in which they were sent."""
    sizes = [1, 70_000, 2, 3_000, EDGE, EDGE + 1, 0, 70_001]
    if comm.rank == 0:
        for work in [comm.isend(np.full(n, float(k)), 1, 4) for k, n in enumerate(sizes)]:
            work.wait()
    elif comm.rank == 1:
        works = [comm.irecv(np.empty(n), 0, 4) for n in sizes]
        for k, work in reversed(list(enumerate(works))):
            assert (work.wait() == k).all()
    assert comm.allreduce(1) == comm.size


def check_both_ways(comm, algorithm):
    """Long messages both ways; each rank waits for something else before it waits for them."""
    if comm.rank < 2:
        peer = 1 - comm.rank
        received = [comm.irecv(np.empty(200_000), peer, tag) for tag in range(3)]
        for tag in range(3):
            comm.send(np.full(200_000, float(comm.rank)), peer, tag)
        assert all((work.wait() == peer).all() for work in received)
        late = comm.irecv(np.empty(300_000), 1) if comm.rank == 0 else None
        if comm.rank == 1:
            comm.send(np.full(300_000, 5.0), 0)
    x = comm.allreduce(np.ones(100_000), algorithm=algorithm)
    assert (x == comm.size).all()
    if comm.rank == 0:
        assert (late.wait() == 5).all()


def check_dropped(comm):
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
