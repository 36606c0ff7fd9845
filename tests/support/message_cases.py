"""Messages that fit their receiver's array, and those that do not: functions of a communicator."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.communicator.layers import guard, max_tag
from mpidist.engine.messages import INLINE_BYTES
from mpidist.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorBroken,
    InvalidArgument,
    InvalidRank,
    MessageMismatch,
    UnsupportedDtype,
)

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


def check_any(comm):
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


def check_any_mismatch(comm):
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


def check_probe(comm):
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


def check_group(comm):
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


def check_group_deadline(comm):
    """A member that never calls it is named within the deadline."""
    sub = comm.split(0)
    members = list(range(min(comm.size, 3)))
    if comm.rank in (0, 2):
        sub.timeout = 0.3
        named = f"of ranks {', '.join(map(str, members))} not finished within 0.3 s: rank "
        named += (
            "1 has not called it$" if comm.rank == 0 else "0 .*or waits for a rank that has not"
        )
        with pytest.raises(
            CollectiveTimeout, match=f"rank {comm.rank}: create_group {named}"
        ) as late:
            sub.create_group(members)
        assert late.value.missing == (1 - comm.rank // 2,)
        with pytest.raises(CommunicatorBroken, match="create_group ended with CollectiveTimeout"):
            sub.barrier()
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


def beside(comm, debug=False):
    """Give a communicator of the same ranks that may be left broken."""
    return Communicator(comm.backend.split(0, comm.rank), comm.config, debug=debug)


def check_posted(comm):
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


def check_posted_apart(comm):
    """A tag of posted messages is another one than that of arrays, objects and what follows."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag in (0, max_tag(comm)):
        long = comm.isend(np.full(EDGE + 1, 1.0), right, tag)
        short = comm.isend(np.full(3, 2.0), right, tag)
        outgoing = comm.post_send(np.full(3, 3.0), right, tag)
        taken, first, second = np.empty(3), np.empty(EDGE + 1), np.empty(3)
        comm.post_recv(taken, left, tag).wait()
        works = [comm.irecv(first, left, tag), comm.irecv(second, left, tag)]
        if comm.rank == 0:
            comm.send_object("object", right, tag)
        elif comm.rank == 1:
            assert comm.recv_object(left, tag) == "object"
        for pending in (*works, outgoing, long, short):
            pending.wait()
        assert (taken == 3).all() and (first == 1).all() and (second == 2).all()


def check_messages_to_oneself(comm):
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
    for refused in (lambda: comm.send(x, comm.rank), lambda: comm.recv(out, comm.rank)):
        with pytest.raises(InvalidArgument, match=rf"rank {comm.rank}: .*itself: .*isend\(\)"):
            refused()


def check_posted_refusals(comm):
    """Bad arguments are named, on every number of ranks, and nothing of them is posted."""
    rank, p, x, other = comm.rank, comm.size, np.ones(4), (comm.rank + 1) % comm.size
    table, frozen = np.ones((4, 4)), np.ones(4)
    frozen.flags.writeable = False
    who = f"rank {rank}: "
    for post in (comm.post_send, comm.post_recv):
        for peer in (p, -1, 1.0, None, True, "0"):
            with pytest.raises(InvalidRank, match=f"{who}peer=.*expected 0 … {p - 1}"):
                post(x, peer)
        with pytest.raises(InvalidArgument, match=f"{who}peer={rank} is this rank itself"):
            post(x, rank)
        for tag in (-1, 1.5, "a", True, max_tag(comm) + 1):
            with pytest.raises(InvalidArgument, match=re.escape(f"{who}tag={tag!r}: ")):
                post(x, other, tag)
        if p == 1:
            continue
        argument = "x" if post == comm.post_send else "out"
        for data, why in ((table[:, 1], "(32,)"), (table.T, "(8, 32)")):
            where = f"{who}{argument} of shape {data.shape} has strides {why}"
            with pytest.raises(InvalidArgument, match=re.escape(where)):
                post(data, other)
        with pytest.raises(UnsupportedDtype, match=f"{who}{argument} has dtype object"):
            post(np.array([None]), other)
    if p > 1:
        for out, why in ((frozen, "read-only"), ([1.0], "numpy array"), (None, "numpy array")):
            with pytest.raises(InvalidArgument, match=f"{who}out .*{why}"):
                comm.post_recv(out, other)
        sub = beside(comm)
        sub.wait_all(mine := [sub.post_recv(x, (rank - 1) % p), sub.post_send(np.ones(4), other)])
        for foreign in (mine[0], 3, comm.ibarrier()):
            with pytest.raises(
                InvalidArgument, match=f"{who}messages has .*expected results of post_send"
            ):
                comm.wait_all([foreign])
    for what in (3, "", " "):
        with pytest.raises(InvalidArgument, match=f"{who}what={what!r}"):
            comm.wait_all([], what)
    with pytest.raises(InvalidArgument, match=f"{who}guard: what=3"):
        with guard(comm, 3):
            pass
    assert comm.allreduce(1) == p


def check_posted_lengths(comm, debug):
    """A message of another length is told to its receiver, and taken; the next one comes.

    Without debug only a shorter one: a longer one some MPI libraries write past the end.
    """
    comm = beside(comm, debug)
    lengths = [(4, 600), (0, 1), (4, 500_000), (500_000, 500_001)]
    for sent, expected in lengths + [(b, a) for a, b in lengths] * debug:
        if comm.rank == 0:
            comm.wait_all([comm.post_send(np.ones(n), 1, 3) for n in (sent, 5)])
        elif comm.rank == 1:
            memory = np.full(max(sent, expected), 77.0)
            wrong = comm.post_recv(memory[:expected], 0, 3)
            right = comm.post_recv(after := np.zeros(5), 0, 3)
            with pytest.raises(CollectiveMismatch) as caught:
                comm.wait_all([wrong, right])
            assert right.test() and (after == 1).all()
            text = f"rank 1: post_recv of {expected * 8} bytes from rank 0 with tag 3: "
            assert str(caught.value).startswith(text) and str(sent * 8) in str(caught.value)
            with pytest.raises(CollectiveMismatch) as again:
                wrong.test()
            assert again.value is caught.value
            assert (memory[expected:] == 77).all()
            assert not debug or (memory == 77).all()
    assert comm.broken is None and comm.allreduce(1) == comm.size
    comm.free()


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


def check_posted_deadline(comm, what):
    """It is told with rank, peer and tag, or in the user's words; the communicator is broken."""
    sub = beside(comm)
    if sub.rank == 0:
        words = {"words": "gradient {3} of stage 1", "function": lambda: "gradient {3} of stage 1"}
        came, late = (sub.post_recv(np.empty(3), 1, tag) for tag in (4, 5))
        sub.recv(np.empty(1), 1, 6)  # its sender has sent, or is about to, what has tag 4
        began = time.monotonic()
        with pytest.raises(CollectiveTimeout) as caught:
            if what == "default":
                late.wait(timeout=0.3)
            else:
                sub.wait_all([came, late], words[what], timeout=0.3)
        assert 0.2 < time.monotonic() - began < sub.timeout / 2
        error = (
            "post_recv of 24 bytes from rank 1 with tag 5" if what == "default" else "gradient {3}"
        )
        assert str(caught.value).startswith(f"rank 0: {error}") and "0.3 s" in str(caught.value)
        assert came.test() and late.test() is False
        assert error in sub.broken
        for call in (sub.barrier, late.wait, lambda: sub.post_send(np.ones(1), 1)):
            with pytest.raises(CommunicatorBroken, match="rank 0: the communicator is broken"):
                call()
        done(comm, 1)
    elif sub.rank == 1:
        sub.post_send(np.ones(3), 0, 4).wait()
        sub.send(np.ones(1), 0, 6)
        stay_away(comm, [0])  # a simulated rank that waited would be seen to do so in vain
    assert comm.allreduce(1) == comm.size


def check_late_message(comm):
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
        early = sub.rank > 1 and comm.backend.native is not None  # as in check_posted_deadline
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


def check_guard(comm):
    """What fails within it leaves the communicator broken; what does not changes nothing."""
    sub = beside(comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with guard(sub, "exchange"):
        pending = [sub.post_recv(np.empty(2), left), sub.post_send(np.ones(2), right)]
        sub.wait_all(pending)
    assert sub.broken is None and sub.allreduce(1) == sub.size
    error = ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError) as caught:
        with guard(sub, "second exchange"):
            late = sub.post_recv(np.empty(2), left)
            raise error
    assert caught.value is error and not late.test()
    assert "second exchange" in sub.broken and "ZeroDivisionError: mine" in sub.broken
    with pytest.raises(CommunicatorBroken, match=f"rank {comm.rank}: .*second exchange"):
        sub.post_send(np.ones(2), right)
    with pytest.raises(CommunicatorBroken, match="second exchange"):
        with guard(sub, "third exchange"):
            raise AssertionError("it must not be entered")
    assert comm.allreduce(1) == comm.size
    sub = beside(comm)
    if sub.rank == 0:
        with pytest.raises(ZeroDivisionError), guard(sub, "an exchange"):
            raise ZeroDivisionError
        for rank in range(1, comm.size):
            done(comm, rank)
    else:  # what waits for a rank that failed alone does not wait until the deadline
        stay_away(comm, [0])
        with pytest.raises(CommunicatorBroken, match="rank 0 has failed before this operation"):
            sub.allreduce(np.ones(3), algorithm="ring")
    assert comm.allreduce(1) == comm.size


def check_freed(comm):
    """After free() nothing is posted; what has moved stays what it was."""
    sub, other = beside(comm), (comm.rank + 1) % comm.size
    done = []
    if comm.size > 1:
        out = np.empty(2)
        done = [sub.post_recv(out, (comm.rank - 1) % comm.size), sub.post_send(np.ones(2), other)]
        sub.wait_all(done)
    assert sub.freed is False
    sub.free()
    assert sub.freed is True and comm.freed is False
    sub.wait_all(done)
    assert all(message.test() for message in done)
    for post in (sub.post_send, sub.post_recv) if comm.size > 1 else ():
        with pytest.raises(
            CommunicatorBroken, match=f"rank {comm.rank}: the communicator was freed"
        ):
            post(np.ones(2), other)
    with pytest.raises(CommunicatorBroken, match="the communicator was freed"):
        with guard(sub, "exchange"):
            pass
    assert comm.allreduce(1) == comm.size


POSTED = {
    "posted": check_posted,
    "apart": check_posted_apart,
    "lengths": lambda comm: check_posted_lengths(comm, False),
    "lengths, debug": lambda comm: check_posted_lengths(comm, True),
    "deadline": lambda comm: check_posted_deadline(comm, "default"),
    "deadline, words": lambda comm: check_posted_deadline(comm, "words"),
    "deadline, function": lambda comm: check_posted_deadline(comm, "function"),
    "late": check_late_message,
    "guard": check_guard,
}
