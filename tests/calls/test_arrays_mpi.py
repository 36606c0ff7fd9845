"""What may be passed as an array: whatever exposes host memory is read, filled and returned."""

import array
import ctypes
import mmap

import ml_dtypes
import numpy as np
import pytest

from mpidist.errors import InvalidArgument, UnsupportedDtype
from tests.support.odd_arrays import odd_exposed, odd_ndarrays
from tests.support.training_kits import NEEDS_TORCH, torch

if torch is not None:
    from tests.support.odd_arrays import Named, odd_tensors, waiting

needs_torch = pytest.mark.skipif(torch is None, reason=NEEDS_TORCH)
N = 4


class Interface:
    """An array of another library, known by numpy's interface only."""

    def __init__(self, data):
        self.data = np.array(data)
        self.__array_interface__ = self.data.__array_interface__


def tensor(data, dtype=None, strided=False, gradient=False):
    data = np.asarray(data)
    made = torch.from_numpy(data.astype("f8")).to(dtype or torch.float32)
    if strided:
        room = torch.zeros(*data.shape[:-1], 3 * data.shape[-1], dtype=made.dtype)
        room[..., 1::3] = made
        made = room[..., 1::3]
    return made.requires_grad_() if gradient else made


def of_ctypes(data):
    return (ctypes.c_long * len(data))(*[int(v) for v in data])


def of_mmap(data):
    made = mmap.mmap(-1, len(data))
    made[:] = bytes(int(v) for v in data)
    return made


def matrix(data):
    return np.asmatrix(np.asarray(data, "f4"))


HOST = {
    "numpy": lambda data: np.array(data, "f8"),
    "numpy strided": lambda data: np.repeat(np.array(data, "f8"), 2)[::2],
    "bytearray": lambda data: bytearray(int(v) for v in data),
    "memoryview": lambda data: memoryview(np.array(data, "i2")),
    "array.array": lambda data: array.array("d", [float(v) for v in data]),
    "ctypes": of_ctypes,
    "mmap": of_mmap,
    "interface": Interface,
}
DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64"]
TENSORS = {
    **{name: lambda data, name=name: tensor(data, getattr(torch, name)) for name in DTYPES},
    "strided": lambda data: tensor(data, strided=True),
    "gradient": lambda data: tensor(data, gradient=True),
    "bfloat16 strided": lambda data: tensor(data, torch.bfloat16, strided=True),
}


def values(x):
    """The elements of anything that is passed or returned."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.tolist()
    if torch is not None and isinstance(x, torch.Tensor):
        return x.detach().to(torch.complex128 if x.is_complex() else torch.float64).tolist()
    return np.asarray(x).tolist()


def check_returned(got, out, x, expected):
    assert values(got) == expected
    if out is not None:
        assert got is out and values(out) == expected
    elif torch is not None and isinstance(x, torch.Tensor):
        assert isinstance(got, torch.Tensor) and got.dtype is x.dtype and not got.requires_grad
        assert got.device.type == "cpu"
    else:
        assert isinstance(got, np.ndarray)


def calls(comm, make):
    """Every collective: name, its arguments without `out`, the result, and who gets it."""
    p, rank = comm.size, comm.rank
    mine = make([rank + 1.0] * N)
    rows = make([10.0 * rank + k for k in range(p)])
    total = [p * (p + 1) / 2.0] * N
    joined = [r + 1.0 for r in range(p) for _ in range(N)]
    everyone, root = [10.0 * r + rank for r in range(p)], p - 1
    at_root = rank == root
    yield "allreduce", (mine,), {}, total, True
    yield "reduce", (mine,), {"root": root}, total, at_root
    yield "allgather", (mine,), {}, joined, True
    yield "gather", (mine,), {"root": root}, joined, at_root
    dealt = [10.0 * p * (p - 1) / 2 + p * rank]
    yield "reduce_scatter", (rows,), {}, dealt, True
    yield "scatter", (rows if at_root else None,), {"root": root}, [10.0 * root + rank], True
    yield "alltoall", (rows,), {}, everyone, True


def play(comm, make, algorithm, background):
    def call(name, *args, **options):
        if background:
            return getattr(comm, f"i{name}")(*args, algorithm=algorithm, **options).wait()
        return getattr(comm, name)(*args, algorithm=algorithm, **options)

    for name, args, options, expected, gets in calls(comm, make):
        before = [values(x) for x in args if x is not None]
        outs = [make([0.0] * len(expected)) if gets else None, None]
        for out in outs * 3:
            if out is not None:
                fill(out)
            got = call(name, *args, out=out, **options)
            if not gets:
                assert got is None
                continue
            model = args[0] if args[0] is not None else make([0.0])
            check_returned(got, out, model, expected)
        assert [values(x) for x in args if x is not None] == before
    for turn in range(3):
        x, root = make([comm.rank + 1.0] * N), turn % comm.size
        assert call("broadcast", x, root=root) is x
        assert values(x) == [root + 1.0] * N
        out = make([0.0] * N)
        assert call("broadcast", x, root=0, out=out) is out
        assert values(out) == [root + 1.0] * N
    x = make([comm.rank + 1.0] * N)
    for turn in range(3):  # the same memory again
        fill(x, comm.rank + turn)
        assert call("allreduce", x, out=x) is x
        assert values(x) == [comm.size * (comm.size - 1) / 2.0 + comm.size * turn] * N


def fill(out, value=7):
    if torch is not None and isinstance(out, torch.Tensor):
        out.detach().fill_(value)
    else:
        np.asarray(out)[...] = value


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
@pytest.mark.parametrize("algorithm", ["auto", "native", "linear"])
@pytest.mark.parametrize("kind", HOST)
def test_host_memory(comm, kind, algorithm, background):
    play(comm, HOST[kind], algorithm, background)


@needs_torch
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
@pytest.mark.parametrize("algorithm", ["auto", "native", "linear"])
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors(comm, kind, algorithm, background):
    play(comm, TENSORS[kind], algorithm, background)


@needs_torch
def test_tensors_of_other_dtypes(comm):
    """Logical operations, complex numbers, shapes of several axes and of none."""
    p = comm.size
    flags = torch.tensor([comm.rank == 0, False])
    got = comm.allreduce(flags, "or")
    assert got.dtype is torch.bool and got.tolist() == [True, False]
    numbers = torch.full((2, 3), complex(1, comm.rank), dtype=torch.complex64)
    got = comm.allreduce(numbers.conj())
    assert got.dtype is torch.complex64 and got.shape == (2, 3)
    assert (got == complex(p, -p * (p - 1) / 2)).all()
    loss = torch.tensor(float(comm.rank), dtype=torch.float64)
    got = comm.allreduce(loss, "mean")
    assert got.shape == () and got.item() == (p - 1) / 2
    assert comm.broadcast(loss, p - 1) is loss and loss.item() == p - 1
    assert comm.allreduce(torch.empty(0, 3)).shape == (0, 3)
    eights = torch.ones(3).to(torch.float8_e4m3fn)
    assert comm.allgather(eights).dtype is torch.float8_e4m3fn
    whole = torch.arange(2.0 * p).to(torch.complex128) if comm.rank == 0 else None
    got = comm.scatter(whole)  # off the root the dtype has come by a message
    assert got.dtype is torch.complex128 and got.tolist() == [2 * comm.rank, 2 * comm.rank + 1]
    turned = torch.full((3, 2), comm.rank + 1.0).t()
    got = comm.allreduce(turned)
    assert got.shape == (2, 3) and (got == p * (p + 1) / 2).all()


@needs_torch
def test_tensors_and_arrays_mix(comm):
    """One rank may pass a tensor and another an array; `out` decides what is returned."""
    p = comm.size
    x = torch.ones(5) if comm.rank % 2 else np.ones(5, "f4")
    got = comm.allreduce(x)
    assert isinstance(got, type(x)) and (np.asarray(got) == p).all()
    out = np.zeros(5, "f4")
    assert comm.allreduce(torch.ones(5), out=out) is out and (out == p).all()
    there = torch.zeros(5)
    assert comm.allreduce(np.ones(5, "f4"), out=there) is there and (there == p).all()
    same = torch.ones(5)
    assert comm.allreduce(same.numpy(), out=same) is same and (same == p).all()
    got = comm.broadcast(bytes([7, 0]) if comm.rank == 0 else bytearray(2))
    assert bytes(got) == bytes([7, 0])


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_in_symmetric_memory(comm, dtype):
    """A tensor on an array of `empty` is symmetric memory too, and the call takes place in it."""
    if comm.topology.num_nodes > 1:
        pytest.skip("needs all ranks on one node")
    known = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    shared = comm.empty(600, known)
    x = torch.from_numpy(shared.view("i2" if dtype == "bfloat16" else known))
    x = x.view(getattr(torch, dtype))
    for background in (False, True):
        for _ in range(3):
            x.fill_(comm.rank + 1)
            if background:
                got = comm.iallreduce(x, out=x, algorithm="symmetric").wait()
            else:
                got = comm.allreduce(x, out=x, algorithm="symmetric")
            assert got is x and (shared == comm.size * (comm.size + 1) / 2).all()
    part = x[100:500]
    part.fill_(comm.rank)
    assert comm.broadcast(part, comm.size - 1, algorithm="symmetric") is part
    assert (part == comm.size - 1).all()
    view = np.asarray(memoryview(shared.view("u1")))
    comm.free(view)
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: .*or was freed"):
        comm.free(shared)


@pytest.mark.parametrize("kind", [*HOST, *(f"tensor {name}" for name in TENSORS)])
def test_messages(comm, kind):
    if comm.size == 1:
        pytest.skip("needs at least 2 ranks")
    if kind.startswith("tensor") and torch is None:
        pytest.skip(NEEDS_TORCH)
    make = TENSORS[kind.removeprefix("tensor ")] if kind.startswith("tensor") else HOST[kind]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(2):
        out = make([0.0] * N)
        work = comm.isend(make([comm.rank + 1.0] * N), right)
        assert comm.recv(out, left) is out
        work.wait()
        assert values(out) == [left + 1.0] * N


# -- what is refused ----------------------------------------------------------------------------


def refuses(comm, call, *words, error=InvalidArgument):
    with pytest.raises(error) as caught:
        call()
    for word in (f"rank {comm.rank}: ", *words):
        assert word in str(caught.value)


def of_every_collective(comm, x):
    rows = x
    yield from (lambda n=n: getattr(comm, n)(rows) for n in ("allreduce", "iallreduce", "reduce"))
    yield from (lambda n=n: getattr(comm, n)(rows) for n in ("allgather", "gather", "alltoall"))
    yield from (lambda n=n: getattr(comm, n)(rows) for n in ("reduce_scatter", "ireduce_scatter"))
    if comm.rank == 0:
        yield from (lambda n=n: getattr(comm, n)(rows) for n in ("broadcast", "ibroadcast"))
    if comm.size > 1:
        yield lambda: comm.send(rows, (comm.rank + 1) % comm.size)


def test_masks_are_refused(comm):
    """Alike on all ranks, which can go on."""
    for x, word in odd_ndarrays(2 * comm.size):
        for call in of_every_collective(comm, x):
            refuses(comm, call, "x is a ", word, "pass ")
        fills = (lambda x=x: comm.allreduce(np.ones(x.shape), out=x), "out is a ", word)
        refuses(comm, *fills)
    for x, word in odd_exposed(2 * comm.size):
        for call in of_every_collective(comm, x):
            refuses(comm, call, "x is a ", word)
    assert comm.allreduce(1) == comm.size


def test_a_mask_in_an_object_arrives(comm):
    """Objects are pickled whole."""
    given = np.ma.masked_array([1.0, 2.0], [0, 1 + comm.rank])
    for found in comm.allgather_object(given):
        assert found.mask.tolist() == [False, True]


@needs_torch
def test_tensors_that_are_not_the_memory_they_show(comm):
    """Each was sent as uninitialised memory, or its result dropped."""
    for x, *words in odd_tensors(2 * comm.size):
        for call in of_every_collective(comm, x):
            refuses(comm, call, "x is a", *words)
        if "meta" not in words:
            refuses(comm, lambda x=x: comm.allreduce(torch.ones(2), out=x), "out is a", *words)
    assert comm.allreduce(1) == comm.size


@needs_torch
def test_an_unfinished_result_is_waited_for(comm):
    """An AsyncCollectiveTensor, as tensor parallelism returns, as input and as output."""
    want = comm.allreduce(np.arange(2.0 * comm.size))
    for make in (waiting, torch.nn.Parameter, lambda x: x.as_subclass(Named)):
        x = make(torch.arange(2.0 * comm.size))
        for algorithm in ("auto", "ring"):
            assert comm.allreduce(x, algorithm=algorithm).tolist() == want.tolist()
        assert comm.iallreduce(x).wait().tolist() == want.tolist()
        with torch.no_grad():
            comm.allreduce(x, out=x)
            assert x.tolist() == want.tolist()


def test_what_cannot_be_filled_is_refused(comm):
    """As `out` of every call, as x of a broadcast off the root, and as recv's: by name."""
    frozen = np.ones(2)
    frozen.flags.writeable = False
    several = np.lib.stride_tricks.as_strided(np.ones(1), (2,), (0,))
    for value, word in (
        ([0.0, 0.0], "list"),
        ((0.0, 0.0), "tuple"),
        (1.5, "float"),
        (np.float64(1.5), "numpy.float64"),
        (bytes(16), "read-only"),
        (memoryview(frozen), "read-only"),
        (frozen, "read-only"),
        (several, "share memory"),
        ("ab", "str"),
    ):
        for call in (
            lambda v=value: comm.allreduce(np.ones(2), out=v),
            lambda v=value: comm.iallreduce(np.ones(2), out=v),
            lambda v=value: comm.allgather(np.ones(2), v),
            lambda v=value: comm.alltoall(np.ones(comm.size), v),
            lambda v=value: comm.reduce_scatter(np.ones(comm.size), out=v),
        ):
            refuses(comm, call, "out ", word)
        if comm.size > 1:
            refuses(comm, lambda v=value: comm.recv(v, (comm.rank + 1) % comm.size), "out ", word)
        if comm.rank:
            refuses(comm, lambda v=value: comm.broadcast(v), "x ", word)
            refuses(comm, lambda v=value: comm.ibroadcast(v), "x ", word)
            refuses(comm, lambda v=value: comm.scatter(None, out=v), "out ", word)
    assert comm.allreduce(1) == comm.size


@needs_torch
def test_tensors_that_are_refused(comm):
    one = torch.ones(2 * comm.size)
    for x, word in (
        (one.to_sparse(), "sparse_coo"),
        (torch.quantize_per_tensor(one, 0.1, 0, torch.qint8), "quantized"),
        (one.to("meta"), "meta"),
        (torch.nested.nested_tensor([one, one]), "nested"),
    ):
        for call in of_every_collective(comm, x):
            refuses(comm, call, "x is a", word)
    bits = torch.empty(comm.size, dtype=torch.bits16)
    refuses(comm, lambda: comm.allgather(bits), "bits16", error=UnsupportedDtype)
    z = torch.ones(2, dtype=torch.complex64)
    for out, word in ((z.conj(), "conjugated"), (z.conj().imag, "negated")):
        x = torch.ones(2, dtype=out.dtype)
        refuses(comm, lambda out=out, x=x: comm.allreduce(x, out=out), "out is a lazily", word)
    spread = torch.zeros(1).expand(2)
    refuses(comm, lambda: comm.allreduce(torch.ones(2), out=spread), "out", "share memory")
    wrong = torch.zeros(2, dtype=torch.float64)
    refuses(comm, lambda: comm.allreduce(torch.ones(2), out=wrong), "out has dtype float64")
    assert comm.allreduce(1) == comm.size
