"""Private arrays through slots of memory that GPUs share; the streams are lazy.

So a slot that is written before all ranks have read it gives a wrong result.
"""

import time

import ml_dtypes
import numpy as np
import pytest

from mpidist import Communicator
from mpidist.device.find import find_device
from mpidist.errors import CollectiveMismatch, Unsupported
from mpidist.gpu import heap, ipc
from mpidist.operations import OPS, kind_of
from mpidist.schedule import Copy, Get, Meet, algorithm
from mpidist.schedule.registry import unregister
from tests.support import collectives as cases
from tests.support.gpu_kits import OnDevice

pytestmark = pytest.mark.one_node


@pytest.fixture
def make(comm, emulated_device, monkeypatch):
    """Makes a communicator whose slots have `nbytes`, and that takes `executor` where it can."""
    made = []

    def make(nbytes=1 << 20, executor="ipc_slots"):
        monkeypatch.setenv("MPIDIST_GPU", executor)
        for module in (heap, ipc):
            monkeypatch.setattr(module, "SLOT_BYTES", nbytes)
        made.append(Communicator(comm.backend.split(0, comm.rank), comm.config))
        return made[-1]

    yield make
    for one in made:
        one.free()


def serving(sub):
    """The names of the executors that serve calls from here on."""
    names = []
    sub._service.note = lambda served: names.append(served.executor)
    return names


@pytest.mark.parametrize("nbytes", [256, 2048, 1 << 20])
@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_every_collective(make, collective, nbytes):
    """In one piece, in many, and in place; every root."""
    sub = make(nbytes)
    names = serving(sub)
    for number, n in enumerate([*cases.lengths(sub.size), 4099]):
        for in_place in (False, True):
            root = (number + in_place) % sub.size
            cases.CHECKS[collective](OnDevice(sub), "auto", n, "int64", root, in_place)
    assert set(names) <= {"ipc_slots", "staged"} and "ipc_slots" in names
    names.clear()
    cases.CHECKS[collective](OnDevice(sub), "slots", 33, "float64", 0, False)
    assert set(names) == {"ipc_slots"}


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "float32", "complex128"])
def test_every_operation(make, dtype):
    """The bits of the host's slots."""
    sub, dtype = make(1024), np.dtype(dtype)
    for n in (1, 700):
        random = np.random.default_rng(sub.rank + n)
        host = (random.normal(size=n) * 3).astype(dtype)
        for name, op in OPS.items():
            if kind_of(dtype) in op.kinds and op.builtin:
                expected = sub.allreduce(host, name, algorithm="staged")
                names = serving(sub)
                got = sub.allreduce(find_device().array(host), name)
                assert names == ["ipc_slots"]
                assert got.get().tobytes() == expected.tobytes(), (name, n)


def test_slots_take_turns(make):
    """Calls follow each other without a wait: on other streams, and among calls of other kinds."""
    sub, device = make(512), find_device()
    streams = [0, device.new_stream(), device.new_stream()]
    there = [device.array(np.full(300, float(sub.rank + k))) for k in range(12)]
    try:
        for k, x in enumerate(there):
            device.use(streams[k % 3])
            sub.allreduce(x, out=x)
            if k % 2:
                sub.barrier()  # calls on the host have the numbers between
            if k % 3 == 1:
                sub.broadcast(x, root=k % sub.size)
        for k, x in enumerate(there):
            device.use(streams[k % 3])
            assert (x.get() == sum(range(sub.size)) + k * sub.size).all()
    finally:
        device.use(0)


@pytest.mark.parametrize("memory", ["symmetric", "private"])
def test_after_a_stream_that_is_gone(make, memory):
    """Its work is done before the next call's: its number means nothing any more."""
    sub, device = make(executor=""), find_device()
    stream = device.new_stream()
    x = sub.empty(9, device="cuda") if memory == "symmetric" else device.array(np.zeros(9))
    try:
        for _ in range(3):
            device.use(stream)
            x.set(np.ones(9))
            sub.allreduce(x, out=x, algorithm="ipc" if memory == "symmetric" else "ipc_slots")
            assert (x.get() == sub.size).all()
            device.use(0)
            device.release_stream(stream)
            assert (sub.allreduce(x, algorithm="ipc_slots").get() == sub.size**2).all()
            stream = device.new_stream()
    finally:
        device.use(0)


def test_symmetric_and_private_arrays(make):
    """Both meet by the same words."""
    sub = make(executor="")
    names = serving(sub)
    x, y = sub.empty(200_000, "f4", device="cuda"), find_device().array(np.ones(200_000, "f4"))
    x.set(np.ones(200_000))
    for _ in range(3):
        sub.allreduce(x, out=x)
        sub.allreduce(y, out=y)
    assert (x.get() == sub.size**3).all() and (y.get() == sub.size**3).all()
    assert names == ["ipc", "ipc_slots"] * 3


def test_what_goes_another_way(make):
    """Short calls, Python functions, parts of lengths that the others do not know."""
    sub, device = make(executor=""), find_device()
    p, names = sub.size, serving(sub)
    long, short = (device.array(np.full(n, sub.rank + 1.0)) for n in (1 << 17, 4))
    assert (sub.allreduce(long).get() == cases.total(p)).all()
    assert (sub.allreduce(short).get() == cases.total(p)).all()
    sub.allreduce(long, lambda a, b: a + b, commute=True)
    assert [name for name in names if name in ("ipc_slots", "staged")][:2] == [
        "ipc_slots",
        "staged",
    ]
    assert names[-1] != "ipc_slots"
    sends = [(r + sub.rank + 1) * 90_000 for r in range(p)]
    names.clear()
    sub.alltoall(device.array(np.zeros(sum(sends))), counts=sends)
    assert "ipc_slots" not in names
    assert sub.iallreduce(long).wait().get()[0] == cases.total(p)
    if p > 1:
        with pytest.raises(CollectiveMismatch, match="ipc_slots"):
            sub.allreduce(long if sub.rank else device.array(np.ones(1 << 18)))
    assert (sub.allreduce(long).get() == cases.total(p)).all()


def test_where_one_rank_has_no_memory(make, monkeypatch):
    """The calls are staged from then on, on all ranks."""
    sub = make()
    last = sub.size - 1

    def full(*_):
        raise Unsupported("out of memory")

    x = find_device().array(np.full(100, sub.rank + 1.0))
    with monkeypatch.context() as patched:
        if sub.rank == last:
            patched.setattr(find_device(), "new_shared", full)
        names = serving(sub)
        assert (sub.allreduce(x).get() == cases.total(sub.size)).all()
    assert "ipc_slots" not in names
    reasons = {one.name: one.why for one in sub.explain("allreduce", 1 << 20, device="cuda")[1]}
    assert f"on rank {last}: out of memory" in reasons["ipc_slots"]


def test_where_one_rank_has_no_scratch_memory(make, monkeypatch):
    """The others are told, no stream waits for one that queues nothing, and all goes on."""
    sub, device = make(2048), find_device()
    if sub.size < 2:
        pytest.skip("needs at least 2 ranks")
    last = sub.size - 1

    def full(*_):
        raise MemoryError("all is in use")

    def reduce(n):
        sub.reduce(arrays[n], out=results[n] if sub.rank == 0 else None)

    arrays = {n: device.array(np.full(n, sub.rank + 1.0)) for n in (100, 400)}
    results = {n: device.array(np.zeros(n)) for n in arrays}
    reduce(100)
    with monkeypatch.context() as patch:
        if sub.rank == last:
            patch.setattr(device, "empty", full)
            expected = pytest.raises(MemoryError, match="^all is in use$")
        else:
            told = rf"reduce without memory \(all is in use\) on rank {last}"
            expected = pytest.raises(CollectiveMismatch, match=told)
        with expected:
            reduce(400)
        reduce(100)
    for n in (400, 100, 400):  # what a call has is not taken from it
        reduce(n)
    if sub.rank == 0:
        assert all((out.get() == cases.total(sub.size)).all() for out in results.values())
    else:
        device.finish()


@pytest.fixture
def from_root():
    """A user's schedule in which the root meets each of the others by itself."""

    @algorithm("broadcast", "by_pairs", memory="slots")
    def by_pairs(rank, size, *, root):
        """The others fetch the root's slot, each after a meeting with the root alone.

        Rounds: size.  Bytes per rank: n.
        """
        others = [peer for peer in range(size) if peer != root]
        yield Copy(0, 0, target="slot0") if rank == root else ()
        for peer in others:
            if rank in (root, peer):
                yield Meet((root, peer))
        yield Copy(0, 0) if rank == root else Get(root, 0, source="slot0")

    yield
    unregister("broadcast", "by_pairs")


@pytest.mark.long
def test_turns_without_a_meeting_of_all(make, from_root, monkeypatch):
    """Not all ranks have met in the call between, but the slot is not written too early."""
    sub, device = make(), find_device()
    last = sub.size - 1
    launch = device.launch

    def late(action, stream):
        launch(lambda: (time.sleep(0.05), action()), stream)

    if sub.rank == last:  # it fetches late
        monkeypatch.setattr(device, "launch", late)
    roots = [0, min(1, last), 0]
    there = [device.array(np.full(5, sub.rank + 10.0 * k)) for k in range(3)]
    for x, root in zip(there, roots):
        sub.broadcast(x, root, algorithm="by_pairs")
    for k, x in enumerate(there):
        assert (x.get() == 10.0 * k + roots[k]).all()


def test_half_precision_by_name(make):
    sub = make()
    x = find_device().array(np.ones(100, ml_dtypes.bfloat16))
    assert (sub.allreduce(x, algorithm="ipc_slots").get().astype("f4") == sub.size).all()
