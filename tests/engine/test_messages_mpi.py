"""Messages on real ranks: pieces, more than 2 GiB, what was never received."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from mpidist import Communicator
from mpidist.backends.mpi import MpiBackend
from mpidist.engine import messages
from mpidist.errors import CollectiveTimeout, CommunicatorBroken
from tests.support.messages import around_the_ring, both_ways, lengths_that_differ


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nodes", ["one", "many"])
def test_messages_never_received_end_with_free(comm, nodes):
    """Nothing sent on a freed communicator arrives on the next one, whose MPI handle may be equal.

    Posted messages, and what ranks tell those of other nodes.
    """
    hosts = [0] * comm.size if nodes == "one" else range(comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def make():
        return Communicator(MpiBackend(comm.backend.comm, hosts), comm.config)

    for turn in range(3):
        sub, stray = make(), np.full(300_000, -1.0)
        for length in (1, 2_000, 300_000):
            sub.post_send(stray[:length], right, 3)
        if nodes == "many":
            sub.backend.roll_call.tell(1, 1, "stray")
        sub.free()
        bare = [comm.backend.comm.Dup() for _ in range(4)]
        comm.barrier()
        arrived = [made.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for made in bare]
        comm.barrier()
        for made in bare:
            made.Free()
        assert not any(arrived)
        sub, out = make(), np.empty(1)
        posted = sub.post_recv(out, left, 3)
        sub.post_send(np.full(1, 10.0 * turn + comm.rank), right, 3)
        posted.wait()
        assert out == 10 * turn + left
        work = sub.irecv(np.empty(1), left, 3)
        sub.send(np.full(1, 20.0 * turn + comm.rank), right, 3)
        assert work.wait() == 20 * turn + left
        assert sub.allgather_object(turn) == [turn] * comm.size
        sub.free()


@pytest.mark.mpi(min_size=2)
def test_pieces_of_long_messages(comm, monkeypatch):
    """Whatever is longer than a piece goes in several, on every path: here a piece is short."""
    monkeypatch.setattr(messages, "CHUNK_BYTES", 10_000)
    backend = MpiBackend(comm.backend.comm)
    backend.piece_bytes = 1_000
    sub = Communicator(backend, comm.config)
    around_the_ring(sub)
    lengths_that_differ(sub, "recv")
    both_ways(sub, "ring")
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


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["array", "object", "messages", "background", "auto", "symmetric"])
def test_more_than_two_gigabytes(comm, path, request, huge):
    """uint8 of 2.2 GB; see test_pieces_of_long_messages for what is cut, at any size."""
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
def test_messages_both_ways_at_once_with_native(comm):
    both_ways(comm, "native")


@pytest.mark.mpi(min_size=2)
def test_create_group_deadline_names_the_missing(comm):
    """A member that never calls it is named within the deadline."""
    sub = comm.split(0)
    members = list(range(min(comm.size, 3)))
    if comm.rank == 0 and comm.size > 2:  # a rank 2 that comes later is missing, too
        wire, until = sub._messages.wire_tag("group", 0), time.monotonic() + 60
        while sub.backend.iprobe(2, wire) is None:
            assert time.monotonic() < until
            time.sleep(0.001)
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
