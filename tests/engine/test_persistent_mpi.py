"""Persistent requests: made for a buffer that is used again, never outliving it, nor keeping it."""

import gc
import weakref

import numpy as np
import pytest

from mpidist.errors import CommunicatorBroken
from tests.support import collectives as cases


class Spy:
    """Counts what a backend is asked to post."""

    def __init__(self, backend, monkeypatch):
        self.sends = self.binds = 0
        isend, bind = backend.isend, backend.bind

        def counted_isend(*arguments):
            self.sends += 1
            return isend(*arguments)

        def counted_bind(messages):
            self.binds += 1
            return bind(messages)

        monkeypatch.setattr(backend, "isend", counted_isend)
        monkeypatch.setattr(backend, "bind", counted_bind)

    def take(self):
        counts = self.sends, self.binds
        self.sends = self.binds = 0
        return counts


@pytest.fixture
def own(comm):
    """A communicator whose caches are empty."""
    made = comm.split(0, comm.rank)
    yield made
    made.free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "broadcast", "allgather", "gather"])
def test_buffers_used_again(own, collective, monkeypatch):
    spy = Spy(own.backend, monkeypatch)
    x, out = np.full(500, own.rank + 1.0), np.empty(500)
    if "gather" in collective:
        out = np.empty(500 * own.size)
    arguments = {"out": out if own.rank == 0 or collective[:3] == "all" else None}
    if collective == "broadcast":
        arguments = {}
    for turn in range(5):
        getattr(own, collective)(x, algorithm="linear", **arguments)
        sends, binds = spy.take()
        assert turn == 0 or sends == 0
        assert turn < 2 or binds == 0
    if collective == "allreduce":
        for k in range(5):  # what is in the buffer counts, not what was
            x[:] = k
            assert (own.allreduce(x, out=out, algorithm="linear") == k * own.size).all()
        assert spy.take() == (0, 0)


def test_new_array_at_the_same_address(own):
    """The allocator gives a freed block out again: nothing of the old array must be left."""
    seen, again = set(), 0
    for k in range(60):
        n = (700, 701, 20_000)[k % 3]
        dtype = ("f8", "i8")[k // 3 % 2]
        x, out = np.full(n, k + own.rank, dtype), np.empty(n, dtype)
        for _ in range(3):
            name = ("ring", "linear", "native")[k % 3]
            own.allreduce(x, out=out, algorithm=name)
            assert (out == k * own.size + sum(range(own.size))).all()
        again += x.ctypes.data in seen
        seen.add(x.ctypes.data)
        del x, out
        if k % 7 == 0:
            gc.collect()
    assert again


def test_another_length_at_the_same_address(own):
    whole = np.empty(1000)
    for n in (1000, 10, 999, 10, 1000):
        for name in ("ring", "linear"):
            x = whole[:n]
            for _ in range(3):
                x[:] = own.rank
                own.allreduce(x, out=x, algorithm=name)
                assert (x == sum(range(own.size))).all()


def test_views(own):
    """Views of one array come and go; the array lives."""
    whole = np.zeros((40, 25))
    for k in range(40):
        for _ in range(3):
            row = whole[k]
            row[:] = own.rank + k
            assert own.allreduce(row, out=row, algorithm="ring") is row
        del row
        assert (whole[k] == k * own.size + sum(range(own.size))).all()
        assert not whole[k + 1 :].any()


def test_memory_that_numpy_does_not_own(own):
    for kind in (bytearray, lambda n: memoryview(bytearray(n))):
        for k in range(12):
            x = np.frombuffer(kind(800), "f8")
            for _ in range(3):
                x[:] = own.rank + k
                own.allreduce(x, out=x, algorithm="ring")
                assert (x == k * own.size + sum(range(own.size))).all()
            del x


def test_resized_arrays(own):
    """numpy moves the memory of an array that is resized, but not while it is watched."""
    x = np.full(100, 1.0)
    for n in (50_000, 100, 200_000):
        x.resize(n, refcheck=False)  # never used yet
        for _ in range(3):
            x[:] = own.rank + n
            own.allreduce(x, out=x, algorithm="ring")
            assert (x == n * own.size + sum(range(own.size))).all()
        with pytest.raises(ValueError, match="cannot resize"):
            x.resize(2 * n, refcheck=False)
        x = np.full(n, 1.0)


@pytest.mark.filterwarnings("ignore:Setting the strides")  # deprecated, but possible
def test_attributes_that_change(own):
    """The very same array object, but of another dtype, or strided now."""
    x = np.full(64, own.rank + 1.0)
    for _ in range(3):
        got = own.broadcast(x, 0, algorithm="linear")
    x.view("i8")
    x.dtype = np.int64
    x[:] = own.rank + 5
    got = own.allreduce(x, out=x, algorithm="linear")
    assert got.dtype == np.int64 and (got == sum(r + 5 for r in range(own.size))).all()
    x, out = np.arange(64.0).reshape(8, 8), np.empty((8, 8))
    for _ in range(2):
        for algorithm in ("linear", "native"):
            for _ in range(3):
                own.allreduce(x, out=out, algorithm=algorithm)
                assert (out == x * own.size).all()
        x.strides = x.strides[::-1]


def cache(comm):
    """Return the bound calls that this communicator keeps."""
    return comm._service.programs


def loop(comm, arrays, turns, algorithm, call="allreduce"):
    """Use all of the arrays in turn, each time with new data; the results must be right."""
    for turn in range(turns):
        for k, x in enumerate(arrays):
            x[:] = comm.rank + k + turn
            made = getattr(comm, call)(x, out=x, algorithm=algorithm)
            if call != "allreduce":
                made.wait()
        for k, x in enumerate(arrays):
            assert (x == (k + turn) * comm.size + sum(range(comm.size))).all(), (turn, k)


@pytest.fixture
def bound(own, monkeypatch):
    """What was bound, and what was served without being found bound, since it was cleared."""
    made = []
    for executor in own._service.executors:
        monkeypatch.setattr(executor, "bind", noting(made, "bind", executor.bind))
    monkeypatch.setattr(own, "_run", noting(made, "run", own._run))
    return made


def noting(made, name, plain):
    """Return a function that notes its name and goes on."""

    def function(*arguments, **more):
        made.append((name, more.get("repeated", False)))
        return plain(*arguments, **more)

    return function


MANY_WAYS = (
    "ring",
    "native",
    *(pytest.param(way, marks=pytest.mark.one_node) for way in ("auto", "symmetric")),
)


@pytest.mark.parametrize("algorithm", MANY_WAYS)
@pytest.mark.parametrize("count", (80, 300))
def test_many_arrays_stay_bound(own, bound, algorithm, count):
    """A step that reduces many short arrays, each by a call of its own."""
    make = own.empty if algorithm == "symmetric" else np.empty
    arrays = [make(10, "float64") for _ in range(count)]
    loop(own, arrays, 3, algorithm)
    bound.clear()
    loop(own, arrays, 3, algorithm)
    assert bound == []


@pytest.mark.parametrize(
    "algorithm", ["ring", pytest.param("symmetric", marks=pytest.mark.one_node)]
)
def test_many_arrays_in_the_background_stay_bound(own, bound, algorithm):
    arrays = [(own.empty if algorithm == "symmetric" else np.empty)(10) for _ in range(150)]
    loop(own, arrays, 2, algorithm, "iallreduce")
    bound.clear()
    loop(own, arrays, 2, algorithm, "iallreduce")
    assert bound == []


@pytest.mark.parametrize("algorithm", MANY_WAYS)
def test_more_buffers_than_are_kept(own, bound, algorithm):
    """As many as fit stay bound, the others are not bound in vain; ranks may differ in which."""
    make = own.empty if algorithm == "symmetric" else np.empty
    kept = cache(own)
    kept.limit = limit = (1 + own.rank % 3) << 17
    arrays = [make(50 + k, "float64") for k in range(100)]
    loop(own, arrays, 4, algorithm)
    bound.clear()
    loop(own, arrays, 2, algorithm)
    assert ("bind", True) not in bound
    found = sum(not entry.shared for entry in kept.entries.values())  # no arrays of its own
    assert bound.count(("run", False)) == 2 * (len(arrays) - found) > 0
    largest = max((entry.nbytes for entry in kept.entries.values()), default=0)
    assert kept.nbytes == sum(entry.nbytes for entry in kept.entries.values())
    assert kept.nbytes <= limit + largest
    others = [make(70, "float64") for _ in range(3)]  # what is used from now on takes their place
    loop(own, others, 12, algorithm)
    bound.clear()
    loop(own, others, 1, algorithm)
    assert bound == []


def test_scratch_memory_counts(own):
    """A kept ring counts the block that comes in, which waits in memory of the call's own.

    If it did not count, long calls would be kept that together hold more than the cache's limit.
    """
    x = np.ones(1 << 18)
    for _ in range(3):
        own.allreduce(x, out=x, algorithm="ring")
    block = x.nbytes // own.size if own.size > 1 else 0
    (entry,) = cache(own).entries.values()
    assert block - 8 <= entry.nbytes < 2 * block + (64 << 10)


@pytest.mark.one_node
def test_scratch_memory_of_kernels_counts(own):
    """Products of half precision are taken in float32, in memory of the call."""
    x = np.ones(1 << 18, "float16")
    for _ in range(3):
        own.allreduce(x, "prod", out=x, algorithm="staged")
    (entry,) = (e for e in cache(own).entries.values() if not e.shared)
    piece = min(256 << 10, -(-x.size // own.size) * 4)  # of float32: a slice, cut into pieces
    assert entry.nbytes >= (2 * 2 * piece if own.size > 1 else 0)  # one term is its own product


def test_windows_of_a_large_array(own):
    """Of programs that are not kept any more nothing is left on the array that they were for."""
    whole = np.zeros(20_000)
    kept = cache(own)
    kept.limit = 1 << 17
    for start in range(0, 19_000, 50):
        window = whole[start : start + 50]
        for _ in range(3):
            own.allreduce(window, out=window, algorithm="ring")
    assert 0 < len(kept.entries) < 40
    assert weakref.getweakrefcount(whole) <= 2 * len(kept.entries)


def test_arrays_are_not_kept_alive(own):
    refs = []
    for name in ("ring", "linear", "native"):
        x, out = np.ones(5000), np.empty(5000)
        for _ in range(4):
            own.allreduce(x, out=out, algorithm=name)
            own.iallreduce(x, out=out, algorithm=name).wait()
            own.broadcast(x, algorithm=name if name != "ring" else "linear")
            own.gather(x, algorithm=name if name != "ring" else "linear")
        refs += [weakref.ref(x), weakref.ref(out)]
        del x, out
    gc.collect()
    own.barrier()
    assert [ref for ref in refs if ref() is not None] == []


def test_programs_go_with_their_arrays(own):
    programs = cache(own)
    x, out = np.ones(100), np.empty(100)
    before = len(programs.entries), programs.nbytes
    for _ in range(3):
        own.allreduce(x, out=out, algorithm="ring")
    assert len(programs.entries) > before[0]
    del out
    gc.collect()
    assert (len(programs.entries), programs.nbytes) == before


def test_free(comm):
    """Persistent requests are freed before the communicator; arrays may live on."""
    x, out = np.ones(300), np.empty(300)
    for _ in range(10):
        sub = comm.split(0, comm.rank)
        for _ in range(3):
            sub.allreduce(x, out=out, algorithm="ring")
            sub.iallreduce(x, out=out, algorithm="ring").wait()
        assert (out == comm.size).all()
        sub.free()
        with pytest.raises(CommunicatorBroken, match="freed"):
            sub.allreduce(x, out=out, algorithm="ring")
        sub.free()  # a second time does no harm
    comm.allreduce(x, out=out, algorithm="ring")
    assert (out == comm.size).all()


def test_all_collectives_repeated_with_new_data(own):
    """Every pair three times with the same arrays: first unbound, then persistent, then quick."""
    p, rank = own.size, own.rank
    for collective, name in cases.PAIRS:
        if cases.cannot(own, collective, name) is not None or collective in ("scatter", "gather"):
            continue
        n = 2 * p
        big, small = np.empty(n * p, "i8"), np.empty(n, "i8")
        given, out = {
            "allreduce": (small, np.empty(n, "i8")),
            "reduce": (small, np.empty(n, "i8") if rank == p - 1 else None),
            "broadcast": (small, None),
            "allgather": (small, big),
            "reduce_scatter": (big, small),
            "alltoall": (big, np.empty(n * p, "i8")),
            "scan": (small, np.empty(n, "i8")),
            "exscan": (small, np.empty(n, "i8")),
        }[collective]
        root = {"root": p - 1} if collective in cases.ROOTED else {}
        for turn in range(3):
            given[:] = rank + 10 * turn
            call = getattr(own, collective)
            got = call(given, algorithm=name, **root, **({} if out is None else {"out": out}))
            summed = 10 * turn * p + sum(range(p))
            blocks = np.repeat(np.arange(p), n) + 10 * turn
            expected = {
                "allreduce": summed,
                "reduce": summed,
                "broadcast": p - 1 + 10 * turn,
                "allgather": blocks,
                "reduce_scatter": summed,
                "alltoall": blocks,
                "scan": 10 * turn * (rank + 1) + sum(range(rank + 1)),
                "exscan": 10 * turn * rank + sum(range(rank)),
            }[collective]
            if got is not None:
                assert (got == expected).all(), (collective, name, turn)


@pytest.mark.parametrize("algorithm", ["auto", "native", "binomial"])
def test_repeated_gather_and_scatter(comm, algorithm):
    """The second call is bound to the first one's arrays: what they hold by then is what counts."""
    p, r = comm.size, comm.rank
    part, whole = np.empty(7), np.empty(7 * p)
    for turn in range(4):
        for root in range(p):
            part[:] = 10 * turn + r
            given = whole if r == root else None
            result = comm.gather(part, root, given, algorithm)
            assert (result is whole) if r == root else result is None
            if r == root:
                assert (whole.reshape(p, 7) == 10 * turn + np.arange(p)[:, None]).all()
                whole += 1
            part[:] = -1
            assert comm.scatter(given, root, part, algorithm) is part
            assert (part == 10 * turn + r + 1).all()
