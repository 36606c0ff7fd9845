"""Results that are stored round the cache are those that are not, bit for bit."""

import numpy as np
import pytest

from mpidist.symmetric import streaming

pytestmark = [
    pytest.mark.one_node,
    pytest.mark.skipif(not streaming.store_width(), reason="needs a C compiler for x86-64"),
]
SIZES = (1, 1009, 70_001)
DTYPES = ("float32", "float16", "complex128")


@pytest.fixture
def streamed(monkeypatch):
    """Have all results streamed, or none; count the copies."""
    plain, copies = streaming._Streamed.__call__, []

    def counted(self):
        copies.append(self.target.nbytes)
        plain(self)

    def switch(on):
        monkeypatch.setenv("MPIDIST_STREAM_BYTES", "0" if on else "none")
        copies.clear()
        return copies

    monkeypatch.setattr(streaming._Streamed, "__call__", counted)
    return switch


def arrays(comm, n, dtype):
    """An input, rewritten for each use, and a result, both symmetric."""
    x, out = comm.empty(n, dtype), comm.empty(n * comm.size, dtype)
    x[:] = (np.arange(n) % 7 + comm.rank + 1).astype(dtype)
    out[:] = 0
    return x, out


def allreduce(comm, n, dtype):
    x, out = arrays(comm, n, dtype)
    return [comm.allreduce(x, op, out=out[:n], algorithm="symmetric") for op in ("sum", "prod")]


def allgather(comm, n, dtype):
    x, out = arrays(comm, n, dtype)
    return [comm.allgather(x, out=out, algorithm="symmetric")]


def broadcast(comm, n, dtype):
    x, _ = arrays(comm, n, dtype)
    return [comm.broadcast(x, root=comm.size - 1, algorithm="symmetric")]


def alltoall(comm, n, dtype):
    x, out = arrays(comm, n * comm.size, dtype)
    return [comm.alltoall(x, out=out[: x.size], algorithm="symmetric")]


@pytest.mark.parametrize("collective", [allreduce, allgather, broadcast, alltoall])
def test_the_same_bits(comm, streamed, collective):
    for dtype in DTYPES:
        for n in SIZES:
            streamed(False)
            expected = [np.array(result) for result in collective(comm, n, dtype)]
            copies = streamed(True)
            for _ in range(2):
                for result, right in zip(collective(comm, n, dtype), expected):
                    assert result.tobytes() == right.tobytes()
            assert copies or n < comm.size or comm.size == 1


def test_in_place_nothing_is_streamed(comm, streamed):
    """What is stored to has just been read, and so is in the cache."""
    copies = streamed(True)
    x = comm.empty(10_000, "float64")
    x[:] = comm.rank
    comm.allreduce(x, out=x, algorithm="symmetric")
    assert not copies and (x == sum(range(comm.size))).all()
