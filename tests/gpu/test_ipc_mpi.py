"""Symmetric memory on a device: the arena, the words by which ranks meet, and who stores what.

The protocol is the one for GPUs; the memory is the host's, numpy stands for the kernels, and the
streams are lazy, so a rank's input is not there for the others before it has met them.
"""

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.device.find import find_device
from mpidist.errors import CollectiveMismatch, InvalidArgument, Unsupported
from mpidist.operations import OPS, divides_first, kind_of
from tests.support import collective_cases as cases

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
            if kind_of(dtype) not in op.kinds:
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
