"""The simulated backend: faults on demand, deadlocks seen at once, and what users test with it."""

import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import CollectiveConfig, Communicator, Faults, SimulatedBackend, run_simulated
from mpidist.backends.simulated import run_group
from mpidist.communicator.layers import max_tag
from mpidist.engine.binding import Binder
from mpidist.engine.storage import HostMemory, Storage
from mpidist.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorBroken,
    DeadlockError,
    InvalidArgument,
    RankFailed,
    ScheduleError,
)
from mpidist.schedule import algorithms
from mpidist.schedule.contract import COLLECTIVES
from mpidist.schedule.rounds import Copy, Reduce, Send, parallel
from mpidist.schedule.unrolled import Lengths, materialise
from tests.support import collectives as cases
from tests.support.messages import short_and_long_in_order

SHORT = CollectiveConfig(timeout=0.4)
SOON = 40.0  # seconds: before the default deadline, on a loaded machine too


@settings(max_examples=150)
@given(data=st.data(), size=st.integers(1, 6), n=st.integers(0, 40))
def test_any_reduction_is_that_of_one_process(data, size, n):
    collective = data.draw(st.sampled_from(["allreduce", "reduce", "reduce_scatter"]))
    op = data.draw(st.sampled_from(["sum", "prod", "max", "min", "and", "or", "xor"]))
    able = [a for a in algorithms(collective) if a.unsupported(size) is None]
    algorithm = data.draw(st.sampled_from(able)).name
    root = data.draw(st.integers(0, size - 1))
    segment = data.draw(st.sampled_from([8, 24, 1 << 20]))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    if collective == "reduce_scatter":
        n = sum(counts)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = random.integers(-(2**62), 2**62, (size, n))
    ufunc = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}.get(
        op, getattr(np, f"bitwise_{op}", None)
    )
    expected = ufunc.reduce(x, axis=0)
    extra = {"root": root} if collective == "reduce" else {}
    extra |= {"counts": counts} if collective == "reduce_scatter" else {}

    def body(comm):
        return getattr(comm, collective)(x[comm.rank], op, algorithm=algorithm, **extra)

    results = run_simulated(size, body, segment_bytes=segment)
    starts = np.concatenate([[0], np.cumsum(counts)])
    for rank, got in enumerate(results):
        if collective == "reduce" and rank != root:
            assert got is None
        elif collective == "reduce_scatter":
            np.testing.assert_array_equal(got, expected[starts[rank] : starts[rank + 1]])
        else:
            np.testing.assert_array_equal(got, expected)


@settings(max_examples=100)
@given(data=st.data(), size=st.integers(1, 6))
def test_any_movement(data, size):
    table = data.draw(
        st.lists(
            st.lists(st.integers(0, 5), min_size=size, max_size=size), min_size=size, max_size=size
        )
    )
    able = {
        c: [a.name for a in algorithms(c) if a.unsupported(size) is None and not a.equal_blocks]
        for c in ("alltoall", "allgather", "gather", "scatter")
    }
    pick = {c: data.draw(st.sampled_from(names)) for c, names in able.items()}
    root = data.draw(st.integers(0, size - 1))
    counts = table[0]
    starts = np.concatenate([[0], np.cumsum(counts)])
    whole = np.arange(sum(counts)) * 3

    def sent(source, target):
        return source * 100 + target * 10 + np.arange(table[source][target])

    def body(comm):
        r = comm.rank
        mine = whole[starts[r] : starts[r + 1]]
        x = np.concatenate([sent(r, d) for d in range(size)])
        return (
            comm.alltoall(x, algorithm=pick["alltoall"], counts=table[r]),
            comm.allgather(mine, algorithm=pick["allgather"], counts=counts),
            comm.gather(mine, root, algorithm=pick["gather"], counts=counts),
            comm.scatter(whole, root, algorithm=pick["scatter"], counts=counts),
        )

    for rank, (a, b, c, d) in enumerate(run_simulated(size, body)):
        np.testing.assert_array_equal(a, np.concatenate([sent(s, rank) for s in range(size)]))
        np.testing.assert_array_equal(b, whole)
        if rank == root:
            np.testing.assert_array_equal(c, whole)
        np.testing.assert_array_equal(d, whole[starts[rank] : starts[rank + 1]])


# -- faults -------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(late=st.lists(st.sampled_from([0, 0, 0.001, 0.003]), min_size=9, max_size=9))
def test_delays_change_nothing(late):
    """Messages overtake those of other ranks; the results stay."""

    def delay(source, target, number):
        return late[(source + 2 * target + 5 * number) % 9]

    def body(comm):
        works = [comm.iallreduce(np.arange(5) + k, algorithm="ring") for k in range(3)]
        gathered = comm.allgather(comm.rank, algorithm="ring")
        return [w.wait().tolist() for w in works[::-1]], gathered.tolist()

    for works, gathered in run_simulated(3, body, faults=Faults(delay=delay)):
        assert works == [[3 * (i + k) for i in range(5)] for k in (2, 1, 0)]
        assert gathered == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_a_lost_message_meets_the_deadline(collective):
    """Without its first message no algorithm, of the first two of each collective, may succeed."""
    for algorithm in [a for a in algorithms(collective) if a.unsupported(4) is None][:2]:
        lost = []

        def drop(source, target, number, lost=lost):
            lost.append((source, target))
            return len(lost) == 1

        def body(comm, name=algorithm.name):
            cases.CHECKS[collective](comm, name, 8, "int64", 0, False)

        begin = time.monotonic()
        with pytest.raises((CollectiveTimeout, CollectiveMismatch)) as caught:
            run_simulated(4, body, config=SHORT, faults=Faults(drop=drop))
        assert time.monotonic() - begin < SOON
        if isinstance(caught.value, CollectiveTimeout):
            assert "within 0.4 s" in str(caught.value)
            assert caught.value.collective == collective and caught.value.sequence


def test_missing_ranks_break_the_communicator():
    """Ranks 0 and 1 come within the deadline: it begins when both have announced the call."""
    ready, both = threading.Barrier(3), threading.Barrier(2)

    def body(comm):
        if comm.rank == 2:
            ready.wait(SOON)
            return None
        deadline = comm._sequencer.deadline
        comm._sequencer.deadline = lambda: (both.wait(SOON), deadline())[1]
        with pytest.raises(CollectiveTimeout) as caught:
            comm.allreduce(1, algorithm="linear")
        assert caught.value.missing == (2,) and caught.value.sequence == 1
        assert "rank 2 not arrived (at no collective yet" in str(caught.value)
        for call in (comm.barrier, lambda: comm.iallreduce(1), lambda: comm.send(1, 2)):
            with pytest.raises(CommunicatorBroken, match="broken since allreduce.*Timeout"):
                call()
        ready.wait(SOON)
        return comm.broken

    results = run_simulated(3, body, config=CollectiveConfig(timeout=3.0))
    assert results[2] is None and "create a new one" in results[0]


def test_a_rank_that_is_killed():
    def body(comm):
        for _ in range(10):
            comm.allreduce(np.ones(4), algorithm="ring")

    begin = time.monotonic()
    with pytest.raises(RankFailed, match="rank 2 was killed after 5 messages"):
        run_simulated(4, body, faults=Faults(kill={2: 5}))
    assert time.monotonic() - begin < SOON  # no deadline was needed


def test_the_error_that_others_follow():
    """A deadline is missed by rank 1; rank 0 is told, and a rank 2 has another fault."""

    def job(comm):
        raise errors[comm.rank]

    errors = [CommunicatorBroken("told"), CollectiveTimeout("late"), ValueError("odd")]
    with pytest.raises(ValueError, match="rank 2: odd"):
        run_simulated(3, job)
    with pytest.raises(CollectiveTimeout, match="rank 1: late"):
        run_simulated(2, job)


@pytest.mark.parametrize("limit", [32767, 32768, 2**23 - 1, 2**31 - 1])
def test_tags_of_each_kind_are_apart(limit):
    """Those of collectives, of each kind of message, and of set-up, whatever the backend allows."""
    used = {}

    class Noting(SimulatedBackend):
        tag_limit = limit

        def _send(self, payload, peer, tag):
            used.setdefault(self.kind, set()).add(tag)
            return super()._send(payload, peer, tag)

    def body(backend):
        comm = Communicator(backend)
        for kind, send in (("array", comm.isend), ("posted", comm.post_send)):
            backend.kind = kind
            for tag in (0, max_tag(comm)):
                if comm.rank == 0:
                    send(np.ones(2), 1, tag)
        backend.kind = "object"
        for tag in (0, max_tag(comm)):
            if comm.rank == 0:
                comm.send_object(1, 1, tag)
        backend.kind = "following"
        comm._messages._followed = max_tag(comm)  # the last of them, and the first
        for _ in range(2):
            if comm.rank == 0:
                comm.isend(np.ones(5000), 1, max_tag(comm))
        backend.kind = "collective"
        comm.iallreduce(np.ones(5), algorithm="ring").wait()
        backend.kind = "set-up"
        comm._service.sequencer.everyone(0)

    run_group(Noting.create_group(2), body, 20)
    used["following"] -= used["array"]
    ranges = sorted((min(tags), max(tags), kind) for kind, tags in used.items())
    names = ["collective", "array", "object", "posted", "following", "set-up"]
    assert [kind for *_, kind in ranges] == names
    for (_, last, _), (first, *_) in zip(ranges, ranges[1:]):
        assert last < first
    assert max(used["set-up"]) <= limit


def test_late_messages():
    """What follows a short message may come long after it, and after that of another one."""

    def delay(source, target, number):
        return 0.02 * (number % 3)

    run_simulated(2, short_and_long_in_order, faults=Faults(delay=delay))


@pytest.mark.parametrize("debug", [False, True])
def test_different_lengths(debug):
    """No rank gets a wrong sum without an error; with debug every rank gets the table."""

    def body(comm):
        with pytest.raises((CollectiveMismatch, RankFailed, DeadlockError)) as caught:
            comm.allreduce(np.ones(3 + (comm.rank == 1)), algorithm="ring")
        if debug:
            assert comm.allreduce(1, algorithm="ring") == 3
        return str(caught.value)

    if not debug:
        try:
            run_simulated(3, body)
        except RankFailed:
            pass
        return
    for text in run_simulated(3, body, debug=True):
        for rank, n in enumerate((3, 4, 3)):
            assert f"rank {rank}: allreduce op=sum {n} x float64" in text
        assert text.count("test_simulated.py:") == 3


def test_debug_compares_everything():
    calls = [
        lambda comm: comm.barrier() if comm.rank else comm.allreduce(1),
        lambda comm: comm.allreduce(1, "max" if comm.rank else "min"),
        lambda comm: comm.broadcast(np.ones(2), root=comm.rank),
        lambda comm: comm.allreduce(np.ones(2, "f4" if comm.rank else "f8")),
        lambda comm: comm.allreduce(1, algorithm="ring" if comm.rank else "linear"),
        lambda comm: comm.reduce(1, root=7 if comm.rank else 0),
        lambda comm: comm.iallgather(np.ones(comm.rank)),
    ]

    def body(comm):
        for call in calls:
            with pytest.raises((CollectiveMismatch, InvalidArgument), match="rank 1"):
                call(comm)
            assert comm.allreduce(1) == 2  # still good

    run_simulated(2, body, debug=True)


def test_split_and_nodes():
    def body(comm):
        sub = comm.split(comm.rank % 2, -comm.rank)
        return sub.rank, sub.size, sub.allgather(comm.rank).tolist(), comm.topology.node_rank

    results = run_simulated(5, body, nodes=["a", "a", "b", "b", "b"])
    assert results[0] == (2, 3, [4, 2, 0], 0) and results[3] == (0, 2, [3, 1], 1)


def test_wrong_groups():
    for size in (0, -1, 1.5, "3"):
        with pytest.raises(InvalidArgument, match=re.escape(f"size={size!r}") + ".*>= 1"):
            SimulatedBackend.create_group(size)
    with pytest.raises(InvalidArgument, match="nodes=.* 2 ranks, not 1"):
        SimulatedBackend.create_group(2, nodes=[0])


@pytest.mark.parametrize("limit", [32767, 1 << 18, 2**31 - 1])
def test_tags_of_operations(limit):
    """MPI promises 32,767; the lower half is of collectives, and each has tags of its own."""
    tags = [set() for _ in range(101)]

    def body(comm):
        send = comm.backend.isend

        def isend(data, peer, tag):
            tags[int(data.view(np.float64)[0])].add(tag)
            return send(data, peer, tag)

        comm.backend.isend = isend
        comm.reduce(np.zeros(1000), algorithm="linear")
        works = [comm.ireduce(np.full(1000, float(k))) for k in range(1, 8)]
        for k in range(8, 101):
            works.pop(0).wait()
            works.append(comm.ireduce(np.full(1000, float(k)), algorithm="linear"))
        return [work.wait() for work in works]

    backends = SimulatedBackend.create_group(2)
    for backend in backends:
        backend.tag_limit = limit
    totals, _ = run_group(backends, lambda b: body(Communicator(b, segment_bytes=64)), 60)
    assert [total[-1] for total in totals] == [2 * k for k in range(94, 101)]
    assert all(0 <= tag < limit // 2 for used in tags for tag in used)
    for k in range(1, 101):
        others = [tags[0], *tags[max(1, k - 7) : k]]  # those that may be under way with it
        assert tags[k] and not any(tags[k] & other for other in others)


def test_more_pending_operations_than_tags():
    """One that begins waits for that which has its tags, or takes the other's messages."""
    begun = threading.Event()

    def body(comm):
        if comm.rank:
            begun.wait(0.3)  # rank 0 is ahead by as many operations as it may begin
        works = []
        for k in range(40):
            works.append(comm.iallreduce(np.full(300, float(k)), algorithm="ring"))
        begun.set()
        return [set(work.wait().tolist()) for work in works]

    backends = SimulatedBackend.create_group(3)
    for backend in backends:
        backend.tag_limit = 32767  # 8 at a time
    for found in run_group(backends, lambda b: body(Communicator(b)), 60):
        assert found == [{3.0 * k} for k in range(40)]


INNERMOST = [(Send(1, blocks=0), Reduce(1, blocks=0))]


@pytest.mark.parametrize(
    "item, error",
    [
        (parallel([parallel([parallel(INNERMOST)])]), "needs tag 65793, .* tags 0 to 65535"),
        (parallel(*[INNERMOST] * 256), "parallel has 256 strands; expected at most 255"),
    ],
)
def test_too_many_tags_for_strands(item, error):
    """Three levels of strands would run into the tags of operations in the background."""
    written = materialise([item])
    backend = SimulatedBackend.create_group(2)[0]
    data = np.ones(1)
    lengths, memory = Lengths.even(1, 1, 1), HostMemory(data.dtype)
    storage = Storage(COLLECTIVES["allreduce"], (0, 2, 0), lengths, data, data, memory)
    with pytest.raises(ScheduleError, match=error):
        Binder(backend, storage.memory, None, False).program(written, storage)


def test_copy_to_a_block_of_another_length():
    data = np.ones(3)
    lengths, memory = Lengths.even(3, 2, 1), HostMemory(data.dtype)
    storage = Storage(COLLECTIVES["allreduce"], (0, 2, 0), lengths, data, data.copy(), memory)
    binder = Binder(SimulatedBackend.create_group(2)[0], memory, None, False)
    with pytest.raises(ScheduleError, match="block 0.* has 2 elements, its target block 1 has 1"):
        binder.program(materialise([(Copy(0, 1, "out"),)]), storage)
