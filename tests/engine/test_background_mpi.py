"""Operations in the background: many at once, waited for in any order, mixed with blocking ones."""

import gc
import itertools
import os
import time

import numpy as np
import pytest

from mpidist.backends.tags import tags_of
from mpidist.calls.prepare import prepare
from mpidist.engine.work import sweep
from mpidist.errors import CollectiveMismatch, CommunicatorBroken
from tests.support import collectives as cases


def begin(comm, collective, name, n, mark):
    """Begin a collective; gives the work and what its result must be."""
    p, rank = comm.size, comm.rank
    root = mark % p
    own = cases.part(rank, n) + mark
    everyone = np.concatenate([cases.part(r, n) + mark for r in range(p)])
    big = np.tile(own, p)
    call = getattr(comm, f"i{collective}")
    summed = sum(cases.part(r, n) + mark for r in range(p))
    if collective == "allreduce":
        return call(own, algorithm=name), summed
    if collective == "reduce":
        return call(own, root=root, algorithm=name), summed if rank == root else None
    if collective in ("scan", "exscan"):
        ranks = range(rank + (collective == "scan"))
        expected = sum(cases.part(r, n) + mark for r in ranks) if ranks else None
        return call(own, algorithm=name), expected
    if collective == "broadcast":
        x = own if rank == root else np.zeros_like(own)
        return call(x, root, algorithm=name), cases.part(root, n) + mark
    if collective == "allgather":
        return call(own, algorithm=name), everyone
    if collective == "gather":
        return call(own, root, algorithm=name), everyone if rank == root else None
    if collective == "reduce_scatter":
        return call(big, algorithm=name), summed
    if collective == "scatter":
        return call(big, root, np.empty_like(own), name), cases.part(root, n) + mark
    return call(big, algorithm=name), everyone


def check(work, expected):
    got = work.wait()
    if expected is None:
        assert got is None
    else:
        np.testing.assert_array_equal(got, expected)


def served(comm):
    pairs = [pair for pair in cases.PAIRS if cases.cannot(comm, *pair) is None]
    return [(c, n) for c, n in pairs if ":" not in n]


@pytest.mark.parametrize("order", ["forward", "backward", "inside out"])
def test_all_in_flight_together(comm, order):
    """One of every kind, begun together, waited for in another order on every rank."""
    begun = [begin(comm, *pair, 300, mark) for mark, pair in enumerate(served(comm))]
    if order == "backward":
        begun.reverse()
    elif order == "inside out":
        begun = begun[comm.rank :: 2] + begun[: comm.rank : 1] + begun[comm.rank + 1 :: 2]
    for work, expected in begun:
        check(work, expected)
    assert all(work.done for work, _ in begun)


def test_mixed_with_blocking_calls(comm):
    pairs = served(comm)
    for mark, (pair, other) in enumerate(zip(pairs[::2], pairs[1::2])):
        work, expected = begin(comm, *pair, 500, mark)
        second, also = begin(comm, *other, 3, mark + 1)
        blocking, name = other
        cases.CHECKS[blocking](comm, name, 40, "int64", mark % comm.size, False)
        barrier = comm.ibarrier(algorithm="linear")
        check(second, also)
        assert barrier.wait() is None
        check(work, expected)


def test_many_at_once(comm):
    """More than there are tags of their own."""
    n = 100
    works = [comm.iallreduce(np.full(9, k + comm.rank), algorithm="linear") for k in range(n)]
    for k in reversed(range(n)):
        assert (works[k].wait() == sum(k + r for r in range(comm.size))).all()


def test_tags_of_pending_operations(comm):
    """What is under way keeps its tags, however many calls come in between.

    If blocking calls counted as well, the second operation would get the tags of the first, and
    take its messages.
    """
    banks = tags_of(comm.backend.tag_limit).banks
    for name in ("ring", "linear"):
        n = 50_000
        first = comm.iallreduce(np.full(n, 1.0), algorithm=name)
        for k in range(banks - 1):  # native calls bring nothing forward
            comm.allreduce(np.float64(k), algorithm="native")
        second = comm.iallreduce(np.full(n, 2.0), algorithm=name)
        assert (second.wait() == 2.0 * comm.size).all()
        assert (first.wait() == comm.size).all()


def test_background_and_persistent_requests(comm):
    """A rank that used its buffer before must meet one that did not."""
    x, out = np.full(3000, comm.rank + 1.0), np.empty(3000)
    for _ in range(3):
        comm.allreduce(x, out=out, algorithm="ring")
    for used in range(comm.size):
        mine = (x, out) if comm.rank == used else (x.copy(), out.copy())
        work = comm.iallreduce(*mine[:1], out=mine[1], algorithm="ring")
        other = comm.allreduce(2 * x, algorithm="ring")
        assert (work.wait() == cases.total(comm.size)).all()
        assert (other == 2 * cases.total(comm.size)).all()


@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
def test_a_repeated_call_is_found(comm, monkeypatch, algorithm):
    """From the third time on nothing is prepared, unless the arrays or the call are others."""
    if algorithm == "native" and comm.backend.native is None:
        algorithm = "direct"
    prepared, x, out = [], np.zeros(1000), np.zeros(1000)

    def preparing(collective, *args, **kwargs):
        prepared.append(collective)
        return prepare(collective, *args, **kwargs)

    monkeypatch.setattr("mpidist.communicator.communicator.prepare", preparing)

    def sums(turn, out=out, **more):
        x[:] = comm.rank + turn
        work = comm.iallreduce(x, out=out, algorithm=algorithm, **more)
        assert work.wait() is out and work.result is out
        return (out == sum(range(comm.size)) + comm.size * turn).all()

    assert all(sums(turn) for turn in range(6)) and len(prepared) == 2
    assert sums(6, op="sum") and len(prepared) == 2
    other = np.zeros(1000)
    assert all(sums(turn, other) for turn in range(3)) and len(prepared) == 4
    assert comm.iallreduce(x, "max", out, algorithm).wait() is out and len(prepared) == 5
    assert (out == comm.size + 1).all()
    # While one is pending, its program cannot be begun once more.
    for _ in range(4):
        for work in [comm.ibarrier() for _ in range(3)][::-1]:
            assert work.wait() is None
    with pytest.raises(Exception, match="expected|dtype"):
        x.dtype = np.int64
        comm.iallreduce(x, out=out, algorithm=algorithm)


def test_what_the_blocking_call_would_return(comm):
    """None where this rank gets nothing, and its own array where that is filled."""
    x, out = np.full(5, comm.rank), np.zeros(5, int)
    for _ in range(4):
        assert comm.ireduce(x, out=out).wait() is (out if comm.rank == 0 else None)
        assert comm.rank or (out == sum(range(comm.size))).all()
        y = np.full(3, comm.rank)
        assert comm.ibroadcast(x, comm.size - 1).wait() is x and (x == comm.size - 1).all()
        x[:] = comm.rank
        assert comm.ibarrier().wait() is None
        fresh = comm.iallreduce(y).wait()
        assert fresh is not y and (fresh == sum(range(comm.size))).all()


def test_busy_buffer_is_read_again(comm):
    """Three pending operations, and one that ends before them, read one array.

    None may keep partial sums in it: another, which has sent its first block only, would add them.
    """
    x = np.arange(2000.0) + comm.rank
    expected = np.arange(2000.0) * comm.size + sum(range(comm.size))
    works = [comm.iallreduce(x, algorithm="ring") for _ in range(3)]
    np.testing.assert_array_equal(comm.allreduce(x, algorithm="ring"), expected)
    for work in works[::-1]:
        np.testing.assert_array_equal(work.wait(), expected)


def test_work_that_is_dropped(comm):
    """Its memory lives on until its messages have moved, and then no longer."""
    for name in ("ring", "native"):
        for _ in range(10):
            comm.iallreduce(np.full(60_000, comm.rank + 1.0), algorithm=name)
            gc.collect()
            assert (np.full(60_000, 7.0) == 7.0).all()  # takes the memory, had it been freed
    for peer in range(comm.size):
        if peer != comm.rank:
            comm.isend([float(comm.rank)] * 60_000, peer)
    gc.collect()
    for peer in range(comm.size):
        if peer != comm.rank:
            assert (comm.recv(np.empty(60_000), peer) == peer).all()
    comm.barrier()
    comm.ibarrier().wait()
    comm.barrier(algorithm="linear")
    works = comm._service.background.works
    end = time.monotonic() + 90
    while works and time.monotonic() < end:  # the others may be waiting for a core
        sweep(works)
        comm._service.sequencer.engine.progress()
        os.sched_yield()
    assert not works


def test_two_communicators(comm):
    other = comm.split(0, -comm.rank)
    assert other.rank == comm.size - 1 - comm.rank
    for first, second in itertools.product(("ring", "native"), repeat=2):
        a = comm.iallreduce(np.full(5000, 1.0 + comm.rank), algorithm=first)
        b = other.iallreduce(np.full(5000, 2.0 + other.rank), algorithm=second)
        c = other.iallgather(np.full(7, other.rank), algorithm="linear")
        assert (comm.allreduce(1, algorithm="linear")) == comm.size
        assert c.wait()[::7].tolist() == list(range(comm.size))
        assert (b.wait() == 2.0 * comm.size + sum(range(comm.size))).all()
        assert (a.wait() == cases.total(comm.size)).all()
    work = other.iallreduce(np.ones(3), algorithm="linear")
    work.wait()
    other.free()
    with pytest.raises(CommunicatorBroken, match="freed"):
        other.iallreduce(1)


def test_work(comm):
    """Its result is refused while it is pending, and stays the same however often it is asked."""
    x = np.full(20_000, 1.0)
    out = np.empty_like(x)
    work = comm.iallreduce(x, out=out, algorithm="linear")
    if comm.size > 1 and comm.rank == comm.size - 1 and not work._done:
        with pytest.raises(RuntimeError, match="pending"):
            work.result  # noqa: B018
    while not work.test():
        pass
    assert work.done and work.test() and work.result is out
    assert work.wait() is out and work.wait(timeout=0.001) is out
    assert (out == comm.size).all()
    mean = comm.iallreduce(np.full(3, comm.rank + 1.0), "mean")
    first = mean.wait()
    assert mean.wait() is first and (first == (comm.size + 1) / 2).all()  # divided once only
    assert comm.iallreduce(2).wait() == 2 * comm.size
    strided = np.zeros((4, 6))[:, ::2]
    assert comm.iallreduce(np.ones((4, 3)), out=strided).wait() is strided
    assert (strided == comm.size).all()


def test_uneven_in_the_background(comm):
    counts = [(r + 1) % 3 for r in range(comm.size)]
    x = np.full((counts[comm.rank], 2), comm.rank)
    expected = np.repeat(np.arange(comm.size), counts)
    for name in ("native", "ring"):
        works = [comm.iallgather(x, algorithm=name, counts=counts) for _ in range(3)]
        for work in works:
            assert (work.wait()[:, 0] == expected).all()


@pytest.mark.mpi(min_size=2)
def test_an_error_stays_with_its_work(comm):
    """A message of another length is found out where it is waited for; nothing else is hurt."""
    if comm.rank == 1:
        comm.send(np.ones(3), 0, tag=5)
        comm.send(np.ones(5), 0, tag=5)
        comm.send(np.ones(4), 0, tag=6)
    elif comm.rank == 0:
        works = [comm.irecv(np.empty(4), 1, tag=5) for _ in range(2)]
        good = comm.irecv(np.empty(4), 1, tag=6)
        assert (good.wait() == 1).all()
        for work in works:
            for _ in range(2):
                with pytest.raises(CollectiveMismatch, match="length"):
                    work.wait()
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "way", ["native", pytest.param("symmetric", marks=pytest.mark.one_node), "ring"]
)
def test_waiting_on_one_communicator_brings_others_forward(comm, way):
    """Rank 0 waits where the others come only when what was begun elsewhere has ended."""
    other = comm.split(0)
    meeting = other.empty(9) if way == "symmetric" else np.zeros(9)
    for begun in ("ring", "linear", "message"):
        meeting[:] = 1
        if begun == "message":
            data = np.full(600_000, comm.rank)
            peers = range(1, comm.size)
            if comm.rank:
                requests = [comm.backend.comm.Irecv(data, 0, 5)]
            else:
                requests = [comm.backend.comm.Isend(data, peer, 5) for peer in peers]

            def wait(requests=requests, data=data):
                for request in requests:
                    request.Wait()
                return data
        else:
            data = np.full(100_000, comm.rank + 1.0)
            wait = comm.iallreduce(data, algorithm=begun).wait
        if comm.rank == 0:
            other.allreduce(meeting, out=meeting, algorithm=way)
        got = wait()
        if comm.rank:
            other.allreduce(meeting, out=meeting, algorithm=way)
        assert (meeting == comm.size).all()
        assert (got == (0 if begun == "message" else sum(range(1, comm.size + 1)))).all()
