"""Symmetric memory on a device: the arena, the words by which ranks meet, and who stores what.

The protocol is the one for GPUs; the memory is the host's, numpy stands for the kernels, and the
streams are lazy, so a rank's input is not there for the others before it has met them.
"""

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.device.find import find_device
from mpidist.errors import CollectiveMismatch, InvalidArgument, Unsupported
from mpidist.gpu.service import leave_all
from mpidist.operations import OPS, divides_first, kind_of
from mpidist.schedule import Fold, Get, Meet, Recv, Send, algorithm
from mpidist.schedule.registry import unregister
from tests.support import collectives as cases

pytestmark = pytest.mark.one_node


@pytest.fixture
def sub(comm, emulated_device, monkeypatch):
    """A communicator that takes symmetric memory or fails."""
    monkeypatch.setenv("MPIDIST_GPU", "ipc")
    made = Communicator(comm.backend.split(0, comm.rank), comm.config)
    yield made
    if made.broken is None:
        made.free()


def open_blocks():
    """How many mappings of devices' memory this process has."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return sum("mpidist-emulated-device" in line for line in lines)


def test_heap_left_after_a_loss(sub):
    """A stream that waits for another rank goes on; memory stays as long as its last array."""
    if sub.size < 2:
        pytest.skip("needs at least 2 ranks")
    x, before = sub.empty(4, "f4", device="cuda"), open_blocks()
    x.set(np.arange(4, dtype="f4"))
    heap, stream = sub.gpu._heap, find_device().current_stream()
    if sub.rank == 0:
        heap.barrier(range(1, sub.size), stream)  # to which no other rank comes
    heap.let_go()  # else it would take a minute
    parts = heap.leave()
    assert len(parts) == 2 and open_blocks() < before
    sub.backend.split(0, sub.rank).close()  # all have come so far
    for part in parts:
        part.left = True
    there = open_blocks()
    del parts, part
    assert open_blocks() == there - 1 and x.get().tolist() == [0, 1, 2, 3]
    del x
    assert open_blocks() == there - 2


def test_all_communicators_left_while_another_ones_stream_waits(sub, monkeypatch):
    """The first that is left waits for the work of the other ones, too."""
    if sub.size < 2:
        pytest.skip("needs at least 2 ranks")
    other = Communicator(sub.backend.split(0, sub.rank), sub.config)
    kept = [one.empty(4, "f4", device="cuda") for one in (sub, other)]
    if sub.rank == 0:
        other.gpu._heap.barrier(range(1, sub.size), find_device().current_stream())
    monkeypatch.setattr("mpidist.gpu.service._in_use", [sub.gpu, other.gpu])
    release = leave_all()  # it would take a minute
    sub.backend.split(0, sub.rank).close()  # all have come so far
    release()
    del kept


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "float32", "complex128", "bool"])
def test_allreduce_of_every_operation(sub, dtype):
    """The bits that `direct` gives on the host; in place, from private and symmetric memory."""
    dtype = np.dtype(dtype)
    for n in (*cases.lengths(sub.size), 4099):
        x = sub.empty(n, dtype, device="cuda")
        other = sub.empty(n, dtype, device="cuda")
        random = np.random.default_rng(sub.rank + n)
        host = (random.integers(0, 3, n) + 1).astype(dtype)
        for name, op in OPS.items():
            if kind_of(dtype) not in op.kinds or not op.builtin:
                continue
            # Of half precision `direct` rounds on the way; single_copy and slots do not either.
            way = "staged" if divides_first(op, dtype) else "direct"
            expected = sub.allreduce(host, name, algorithm=way)
            x.set(host)
            assert sub.allreduce(x, name, out=x) is x
            other.set(host)
            sub.allreduce(other, name, out=x)
            assert x.get().tobytes() == expected.tobytes(), (name, n)
            private = find_device().array(host)
            sub.allreduce(private, name, out=x)
            assert x.get().tobytes() == expected.tobytes(), (name, n)
            assert np.array_equal(other.get(), host)
        sub.free(x)
        sub.free(other)


def test_mean_of_half_precision(sub):
    x = sub.empty(500, "f2", device="cuda")
    x.set(np.full(500, 65504, "f2"))
    sub.allreduce(x, "mean", out=x)
    assert (x.get() == 65504).all()
    sub.free(x)


def test_the_others(sub):
    """broadcast from every root, allgather and reduce_scatter, with counts that differ."""
    p, rank, device = sub.size, sub.rank, find_device()
    for counts in ([3 * r for r in range(p)], [7] * p):
        total = sum(counts)
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        x = sub.empty((total,), "i4", device="cuda")
        data = np.arange(total, dtype="i4")
        private = device.array(data[mine])  # it is read when someone waits for the stream
        sub.allgather(private, out=x, counts=counts)
        assert np.array_equal(x.get(), data)
        x.set(np.where((data >= mine.start) & (data < mine.stop), data, -1))
        sub.allgather(x[mine], out=x, counts=counts)
        assert np.array_equal(x.get(), data)
        x.set(data * (rank + 1))
        part = sub.reduce_scatter(x, counts=counts)
        assert np.array_equal(part.get(), data[mine] * cases.total(p))
        assert np.array_equal(x.get(), data * (rank + 1))
        sub.reduce_scatter(x, out=x[mine], counts=counts)
        assert np.array_equal(x.get()[mine], data[mine] * cases.total(p))
        for root in range(p):
            x.set(data * (rank + 2))
            assert sub.broadcast(x, root) is x
            assert np.array_equal(x.get(), data * (root + 2))
        sub.free(x)


def test_bits_of_direct(sub):
    """Each block is combined in the order of "direct", which matters for floats of 3 ranks."""
    n, rank = 1000 * sub.size, sub.rank
    host = np.random.default_rng(rank).standard_normal(n).astype("f4")
    x, part = sub.empty(n, "f4", device="cuda"), find_device().empty((n // sub.size,), "f4")
    x.set(host)
    sub.reduce_scatter(x, out=part)
    expected = sub.reduce_scatter(host.copy(), algorithm="direct")
    assert part.get().tobytes() == expected.tobytes()
    sub.allreduce(x, out=x)
    assert x.get().tobytes() == sub.allreduce(host.copy(), algorithm="direct").tobytes()


def test_schedules_by_name(sub):
    """Shipped ones that "auto" does not take, and a mean with them."""
    p, rank = sub.size, sub.rank
    x, out = (sub.empty(2 * p, "f4", device="cuda") for _ in range(2))
    x.set(np.arange(2 * p) + 100 * rank)
    sub.alltoall(x, out=out, algorithm="in_place")
    mine = np.arange(2 * rank, 2 * rank + 2)
    assert np.array_equal(out.get().reshape(p, 2), mine + 100 * np.arange(p)[:, None])
    for root in range(p):
        target = find_device().empty((2 * p,), "f4") if rank == root else None
        sub.reduce(x, "mean", root, out=target, algorithm="in_place_one_shot")
        assert x.get()[0] == 100 * rank  # every stream runs, which the root's waits for
        if target is not None:
            assert np.array_equal(target.get(), np.arange(2 * p) + 50 * (p - 1))
    x.set(np.full(2 * p, rank + 1.0))
    sub.allreduce(x, out=x, algorithm="in_place")
    assert (x.get() == cases.total(p)).all()
    if p > 1:
        name = "in_place" if rank else "auto"
        with pytest.raises(CollectiveMismatch, match="by in_place in symmetric memory of GPUs @"):
            sub.allreduce(x, out=x, algorithm=name)


@pytest.fixture
def own():
    """Schedules of a user in mapped memory, by name."""

    @algorithm("broadcast", "handed_on", memory="mapped")
    def handed_on(rank, size, *, root):
        """Every rank fetches the data from the one before, as soon as that has them."""
        at, every = (rank - root) % size, range(size)
        if size > 1:
            yield Meet(every)
        if at:
            before = (rank - 1) % size
            yield Meet((before, rank))
            yield Get(before, blocks=0)
        if 0 < at + 1 < size:
            yield Meet((rank, (rank + 1) % size))
        if size > 1:
            yield Meet(every)

    @algorithm("allgather", "fetched", memory="mapped")
    def fetched(rank, size):
        """Every rank fetches the blocks of the others; its own is still in its input."""
        yield Meet(range(size))
        yield tuple(Get(p, blocks=p, source="in") for p in range(size) if p != rank)
        yield Meet(range(size))

    @algorithm("allreduce", "beside", memory="mapped", ordered=True)
    def beside(rank, size):
        """Every rank combines everything in memory beside its array, which others read."""
        yield Meet(range(size))
        if rank == 0:
            yield Fold(range(size), blocks=0, target="tmp")
        yield Meet(range(size))
        yield Get((rank + 1) % size if rank else 0, blocks=0, source="tmp")

    @algorithm("allreduce", "partly", memory="mapped")
    def partly(rank, size):
        """No rank combines the operands of all: a mean would have to be divided afterwards."""
        yield Meet(range(size))
        yield Fold((rank,), blocks=0)
        yield Meet(range(size))

    @algorithm("allreduce", "told", memory="mapped")
    def told(rank, size):
        """Ranks send a message in the middle."""
        yield Meet(range(size))
        yield Send((rank + 1) % size, 0), Recv((rank - 1) % size, 0, "tmp")
        yield Meet(range(size))

    yield
    for collective, name in (
        ("broadcast", "handed_on"),
        ("allgather", "fetched"),
        ("allreduce", "beside"),
        ("allreduce", "partly"),
        ("allreduce", "told"),
    ):
        unregister(collective, name)


def test_schedules_of_a_user(sub, own):
    """They run where the device has their steps; what it lacks is said."""
    p, rank = sub.size, sub.rank
    x, out = sub.empty(3, "i4", device="cuda"), sub.empty(3 * p, "i4", device="cuda")
    for root in range(p):
        x.set(np.arange(3) * (rank + 2))
        sub.broadcast(x, root, algorithm="handed_on")
        assert np.array_equal(x.get(), np.arange(3) * (root + 2))
    total = sub.empty(3, "f4", device="cuda")
    x.set(np.arange(3) + rank)
    sub.allgather(x, out=out, algorithm="fetched")
    assert np.array_equal(out.get().reshape(p, 3), np.arange(3) + np.arange(p)[:, None])
    if p > 1:
        with pytest.raises(Unsupported, match="x was not allocated by comm.empty"):
            sub.allgather(find_device().array(x.get()), out=out, algorithm="fetched")
        refused = (
            ("beside", "sum", "others reach its 'tmp', which is not at one location"),
            ("partly", "mean", "it combines in several steps"),
            ("told", "sum", "it sends messages, too"),
        )
        for name, op, words in refused:
            with pytest.raises(Unsupported, match=words):
                sub.allreduce(total, op, out=total, algorithm=name)
        with pytest.raises(Unsupported, match="others reach its 'out', which is not"):
            sub.gather(x, algorithm="in_place")
    sub.broadcast(x, 0)
    assert np.array_equal(x.get(), np.arange(3))


def test_who_meets_before_what(sub):
    """Nothing is read before its rank has produced it, nor overwritten while others read it."""
    device, n = find_device(), 64
    x = sub.empty(n, "f8", device="cuda")
    streams = [0, device.new_stream(), device.new_stream()]
    try:
        for turn in range(12):
            device.use(streams[turn % 3])  # of one array on several streams: calls keep their order
            x.set(np.full(n, float(sub.rank + turn)))
            for _ in range(2):
                sub.allreduce(x, "max", out=x)
            sub.allreduce(x, out=x)
            device.synchronize(device.current_stream())
            assert (x._memory == (sub.size - 1 + turn) * sub.size).all()
            sub.barrier()
        y = sub.empty(n, "f8", device="cuda")
        for turn in range(12):
            for stream, array in ((1, x), (2, y)):  # of two arrays, and the second is waited for
                device.use(streams[stream])
                array.set(np.full(n, float(sub.rank + turn)))
                sub.allreduce(array, out=array)
            expected = sum(range(turn, turn + sub.size))
            assert (y.get() == expected).all()
            device.use(streams[1])
            assert (x.get() == expected).all()
    finally:
        device.use(0)


def test_a_stream_that_is_gone(sub):
    """The next call waits for the last one, whose stream the user has dropped meanwhile."""
    device, x = find_device(), sub.empty(64, "f8", device="cuda")
    before = device.current_stream()
    for turn in range(4):
        stream = device.new_stream()
        device.use(stream)
        x.set(np.full(64, float(sub.rank + turn)))
        sub.allreduce(x, out=x)
        device.synchronize(stream)
        device.use(before)
        device.release_stream(stream)
        assert (x.get() == sum(range(turn, turn + sub.size))).all()


def test_what_is_refused(sub):
    device, others = find_device(), sub.size > 1
    x, y = (sub.empty(8, "f4", device="cuda") for _ in range(2))
    private = device.array(np.ones(8, "f4"))
    with pytest.raises(Unsupported, match="=ipc: allreduce: out was not allocated by comm.e"):
        sub.allreduce(private)
    with pytest.raises(Unsupported, match="a Python function cannot run on a device"):
        sub.allreduce(x, lambda a, b: a + b, out=x, commute=True)
    with pytest.raises(InvalidArgument, match="device='tpu': expected None or 'cuda'"):
        sub.empty(3, device="tpu")
    with pytest.raises(InvalidArgument, match="x was not allocated by empty"):
        sub.free(private)
    got = sub.gather(private)  # has no form here, and goes another way
    assert sub.rank or (got.get() == 1).all()
    if others:
        mine = y if sub.rank else x
        with pytest.raises(CollectiveMismatch, match="in symmetric memory of GPUs @"):
            sub.allreduce(mine, out=mine)
    x.set(np.ones(8))
    assert (sub.allreduce(x, out=x).get() == sub.size).all()


@pytest.mark.parametrize("what", ["new_shared", "open_shared"])
def test_where_one_rank_has_no_memory(sub, what, monkeypatch):
    """All are told, nothing is kept, and all goes on."""
    sub.free(sub.empty(3, device="cuda"))  # the words by which the ranks meet stay
    before, last = open_blocks(), sub.size - 1
    if what == "open_shared" and not last:
        pytest.skip("needs at least 2 ranks")

    def full(*_):
        raise Unsupported("out of memory")

    with monkeypatch.context() as patched:
        if sub.rank == last:
            patched.setattr(find_device(), what, full)
        with pytest.raises(Unsupported, match=rf"rank {sub.rank}: .*on rank {last}: out of mem"):
            sub.empty(1 << 20, device="cuda")
    assert open_blocks() == before
    x = sub.empty(4, device="cuda")
    assert (sub.allreduce(x, out=x).get() == 0).all()


def test_memory_is_given_back(sub):
    before = open_blocks()
    x = sub.empty((3, 5), device="cuda")
    assert x.shape == (3, 5) and (x.get() == 0).all()
    assert open_blocks() > before
    x.set(np.ones((3, 5)))
    sub.allreduce(x, out=x)  # under way when it is freed: that waits
    sub.free(x)
    with pytest.raises(InvalidArgument, match="not an address of"):
        sub.free(x)
    sub.empty(7, device="cuda")
    sub.free()
    assert open_blocks() == before
