"""What is compiled gives the bits of what is not, through the cache and round it."""

import numpy as np
import pytest

from mpidist.shared_memory import compiled

pytestmark = [
    pytest.mark.one_node,
    pytest.mark.skipif(not compiled.vector_width(), reason="needs a C compiler for x86-64"),
]
WIDTH = compiled.vector_width()
SIZES = (1, 1009, 70_001)
DTYPES = ("float32", "float16", "complex128")


@pytest.fixture
def by(monkeypatch):
    """Choose between numpy, the compiled code, and that with all streamed; note what is bound."""
    plain, calls = compiled._bind, []

    def noted(name, told, *kept):
        calls.append(told)
        return plain(name, told, *kept)

    def switch(what):
        monkeypatch.setenv("MPIDIST_STREAM_BYTES", "0" if what == "streamed" else "none")
        for module in (compiled, compiled):
            monkeypatch.setattr(module, "vector_width", lambda: 0 if what == "numpy" else WIDTH)
        calls.clear()
        return calls

    monkeypatch.setattr(compiled, "_bind", noted)
    return switch


def arrays(comm, n, dtype):
    """An input, rewritten for each use, and a result, both symmetric."""
    x, out = comm.empty(n, dtype), comm.empty(n * comm.size, dtype)
    x[:] = (np.arange(n) % 7 + comm.rank + 1).astype(dtype)
    out[:] = 0
    return x, out


def allreduce(comm, n, dtype):
    x, out = arrays(comm, n, dtype)
    return [
        np.array(comm.allreduce(x, op, out=out[:n], algorithm="symmetric"))
        for op in ("sum", "prod", "mean")
    ]


def reduce(comm, n, dtype):
    x, out = arrays(comm, n, dtype)
    root = comm.size - 1
    result = comm.reduce(x, root=root, out=out[:n], algorithm="symmetric")
    return [result] if comm.rank == root else []


def reduce_scatter(comm, n, dtype):
    x, out = arrays(comm, n * comm.size, dtype)
    return [comm.reduce_scatter(x, out=out[:n], algorithm="symmetric")]


def allgather(comm, n, dtype):
    x, out = arrays(comm, n, dtype)
    return [comm.allgather(x, out=out, algorithm="symmetric")]


def broadcast(comm, n, dtype):
    x, _ = arrays(comm, n, dtype)
    return [comm.broadcast(x, root=comm.size - 1, algorithm="symmetric")]


def alltoall(comm, n, dtype):
    x, out = arrays(comm, n * comm.size, dtype)
    return [comm.alltoall(x, out=out[: x.size], algorithm="symmetric")]


@pytest.mark.parametrize(
    "collective", [allreduce, reduce, reduce_scatter, allgather, broadcast, alltoall]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits(comm, by, collective, dtype):
    sums = collective in (allreduce, reduce, reduce_scatter)
    sums = sums and (dtype != "float16" or WIDTH >= 32)
    moves = collective in (allreduce, allgather, broadcast, alltoall)
    for n in SIZES:
        assert not by("numpy")
        expected = [np.array(result) for result in collective(comm, n, dtype)]
        for what in ("compiled", "streamed"):
            calls = by(what)
            for _ in range(2):
                for result, right in zip(collective(comm, n, dtype), expected):
                    assert result.tobytes() == right.tobytes()
            if n > 70_000 and comm.size > 1:
                assert bool(calls) == (sums or moves and what == "streamed")


def test_in_place_nothing_is_streamed(comm, by):
    """What is stored to has just been read, and so is in the cache; one rank stores nothing."""
    calls = by("streamed")
    x = comm.empty(10_000, "float64")
    x[:] = comm.rank
    comm.allreduce(x, out=x, algorithm="symmetric")
    assert [told.streamed for told in calls] == [False] * (comm.size > 1)
    assert (x == sum(range(comm.size))).all()
