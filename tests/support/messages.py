"""Messages whose arrays fit or do not, and ranks that are late or gone: for tests of messages."""

import time

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.communicator.layers import max_tag
from mpidist.engine.messages import INLINE_BYTES
from mpidist.errors import CollectiveMismatch, MessageMismatch

EDGE = INLINE_BYTES // 8  # elements of the longest short message
# Elements sent and expected: shorter and longer, within a short message and beyond one.
LENGTHS = [(600, 4), (4, 600), (500_000, 4), (4, 500_000), (3_000, 2_000), (0, 1), (1, 0)]
LENGTHS += [(EDGE, EDGE + 1), (EDGE + 1, EDGE)]


FIELDS = np.dtype([(f"field{k:03}", "f4") for k in range(60)])
OTHER = np.dtype([(f"field{k:03}", "f4" if k < 59 else "i4") for k in range(60)])


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


def lengths_that_differ(comm, receive):
    """Every pair of lengths that differ."""
    for sent, expected in LENGTHS:
        refused(comm, ("f8", (sent,)), ("f8", (expected,)), RECEIVE[receive])


def short_and_long_in_order(comm):
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


def both_ways(comm, algorithm):
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


def around_the_ring(comm):
    """Whatever the length and dtype, on the memory itself, several at once, in order."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    forms = [("f8", 1), ("f4", 100_003), ("u1", 0), ("i2", EDGE), (FIELDS, 3), ("M8[s]", 2)]
    sent = [
        np.full(n * np.dtype(d).itemsize, comm.rank + k, "u1") for k, (d, n) in enumerate(forms)
    ]
    rooms = [np.full(part.size, 77, "u1") for part in sent]
    incoming = [comm.post_recv(room.view(d), left, 5) for room, (d, _) in zip(rooms, forms)]
    outgoing = [comm.post_send(part.view(d), right, 5) for part, (d, _) in zip(sent, forms)]
    assert [m.nbytes for m in incoming] == [part.size for part in sent]
    assert {(m.peer, m.tag) for m in incoming} == {(left, 5)}
    comm.wait_all(outgoing + incoming)
    for k, room in enumerate(rooms):
        assert (room == left + k).all()
    assert all(m.test() and m.wait() is None for m in outgoing + incoming)
    comm.wait_all([])
    table, frozen = np.zeros((3, 4)), np.arange(12.0) + comm.rank
    frozen.flags.writeable = False
    message = comm.post_recv(table, left, max_tag(comm))
    comm.post_send(frozen.reshape(3, 4), right, max_tag(comm)).wait()
    message.wait()
    assert (table == np.arange(12.0).reshape(3, 4) + left).all()


def beside(comm, debug=False):
    """Give a communicator of the same ranks that may be left broken."""
    return Communicator(comm.backend.split(0, comm.rank), comm.config, debug=debug)


def stay_away(comm, others, tag=77):
    """Do nothing until the others have told `comm` that they are done, as :func:`done` does.

    A fixed time would be too long on most days, and too short on a busy machine.
    """
    works, until = [comm.irecv(np.empty(1), rank, tag) for rank in others], time.monotonic() + 90
    while not all(work.test() for work in works):
        assert time.monotonic() < until, f"one of ranks {list(others)} has not said that it is done"
        time.sleep(0.005)


def done(comm, who, tag=77):
    """End the absence of a rank that :func:`stay_away`s."""
    comm.send(np.ones(1), who, tag)
