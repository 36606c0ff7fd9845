"""Posted messages: on the memory itself, their deadlines, what is refused."""

import gc
import re
import time

import numpy as np
import pytest

from mpidist.communicator.layers import guard, max_tag
from mpidist.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorBroken,
    InvalidArgument,
    InvalidRank,
    UnsupportedDtype,
)
from tests.support.messages import EDGE, around_the_ring, beside, done, stay_away


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.mpi(min_size=2)
def test_posted_messages_of_many_forms_go_around_the_ring(comm):
    around_the_ring(comm)


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.mpi(min_size=2)
def test_posted_tags_are_apart_from_others(comm):
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


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("debug", [False, True])
def test_posted_message_of_another_length_is_told(comm, debug):
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


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["default", "words", "function"])
def test_posted_message_deadline_is_told(comm, what):
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


@pytest.mark.ranks(1, 2, 3)
def test_posted_wrong_arguments_are_refused(comm):
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


@pytest.mark.ranks(1, 2, 3)
def test_posted_after_free_is_refused(comm):
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


@pytest.mark.mpi(min_size=2)
def test_posted_and_dropped_memory_is_kept(comm):
    """Memory of a posted message that nobody holds any more is kept until the message has come."""
    sub = beside(comm)
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
