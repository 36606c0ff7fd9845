"""Symmetric arrays where the ranks differ, or ask for what cannot be."""

import numpy as np
import pytest

import mpidist

pytestmark = pytest.mark.one_node

N = 1000


def total(comm):
    return comm.size * (comm.size + 1) / 2


@pytest.mark.parametrize("other", ["private", "result", "slice"])
@pytest.mark.mpi(min_size=2)
def test_unequal_places_are_reported(comm, other):
    """The others would read what lies there: it must be said, and nothing be touched."""
    both, out = comm.empty(2 * N), comm.empty(N)
    both[:], out[:] = -1, comm.rank + 1
    sources = {"private": np.full(N, comm.rank + 1.0), "result": out, "slice": both[N:]}
    x = sources[other] if comm.rank == 1 else both[:N]
    for _ in range(2):
        with pytest.raises(mpidist.CollectiveMismatch, match=f"rank {comm.rank}: collective"):
            comm.allreduce(x, out=out, algorithm="symmetric")
    comm.allreduce(out, out=out, algorithm="symmetric")
    assert (out == total(comm)).all() and (both == -1).all()


def test_mixed_places_of_inputs(comm):
    out = comm.empty(N)
    for _ in range(3):
        out[:] = comm.rank + 1
        x = out if comm.rank == 0 else np.full(N, comm.rank + 1.0)
        comm.allreduce(x, out=out, algorithm="symmetric")
        assert (out == total(comm)).all()


def test_an_input_that_was_freed_is_private(comm):
    """A kernel made before must not go on reading it in the others' memory."""
    x, out = comm.empty(N), comm.empty(N)
    x[:] = comm.rank + 1
    for _ in range(3):  # the second call binds it
        comm.allreduce(x, out=out, algorithm="symmetric")
    comm.free(x)
    mine = np.full(N, comm.rank + 1.0) if comm.rank == comm.size - 1 else x
    if mine is not x:
        x[:] = -1
    for _ in range(2):
        out[:] = 0
        comm.allreduce(mine, out=out, algorithm="symmetric")
        assert (out == total(comm)).all()


@pytest.mark.parametrize("collective", ["gather", "scatter", "reduce", "broadcast", "allreduce"])
def test_free_during_an_operation(comm, collective):
    p, r = comm.size, comm.rank
    x, y = comm.empty(N), comm.empty(N * p)
    x[:], y[:] = r, np.repeat(np.arange(p), N)
    works = {
        "gather": lambda: comm.igather(x, algorithm="symmetric"),
        "scatter": lambda: comm.iscatter(np.array(y), out=x, algorithm="symmetric"),
        "reduce": lambda: comm.ireduce(x, algorithm="symmetric"),
        "broadcast": lambda: comm.ibroadcast(x, algorithm="symmetric"),
        "allreduce": lambda: comm.iallreduce(x, out=x, algorithm="symmetric"),
    }
    work = works[collective]()
    comm.free(x)
    got = work.wait()
    if collective == "gather" and r == 0:
        assert (got == y).all()
    elif collective == "scatter":
        assert (x == r).all()
    elif collective == "broadcast":
        assert (x == 0).all()
    elif got is not None:
        assert (got == p * (p - 1) / 2).all()
    assert comm.allreduce(1) == p


def test_after_very_many_allocations(comm):
    """Their numbers go through words of 64 bits, beside a place in them."""
    heap = comm._service.heap
    comm.empty(1)
    heap._last_number = max(heap._last_number, 1 << 40)
    x, out = comm.empty(N), comm.empty(N * comm.size)
    x[:] = comm.rank
    got = comm.gather(x, out=out if comm.rank == 0 else None, algorithm="symmetric")
    if comm.rank == 0:
        assert (got.reshape(comm.size, N) == np.arange(comm.size)[:, None]).all()


@pytest.mark.parametrize(
    "shape",
    [-1, (3, -1), 1.5, "a", None, (2**32, 2**32), (0, 2**40, 2**40), 2**100, (1,) * 65],
    ids=str,
)
def test_shapes_that_cannot_be(comm, shape):
    with pytest.raises(mpidist.InvalidArgument, match=f"rank {comm.rank}: shape"):
        comm.empty(shape)
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("dtype", ["O", "nonsense", "S0", "V0"])
def test_dtypes_that_cannot_be(comm, dtype):
    with pytest.raises(mpidist.InvalidArgument, match=f"rank {comm.rank}: dtype"):
        comm.empty(3, dtype)
    assert comm.allreduce(1) == comm.size


def test_more_than_there_is(comm):
    with pytest.raises(MemoryError, match=rf"rank {comm.rank}: .* on rank 0: .* \d+ free"):
        comm.empty(2**50, "uint8")
    x = comm.empty(3)
    assert (comm.allreduce(x + 1, out=x) == comm.size).all()


@pytest.mark.parametrize(
    "dtype", ["S3", "V5", "M8[s]", ">f4", ("f4", (2,)), [("a", "i4")]], ids=str
)
def test_empty_with_other_dtypes(comm, dtype):
    x, like = comm.empty((2, 3), dtype), np.zeros((2, 3), dtype)
    assert x.shape == like.shape and x.dtype == like.dtype and x.tobytes() == like.tobytes()
    got = comm.broadcast(x, algorithm="symmetric")
    assert got is x and x.tobytes() == like.tobytes()


def test_what_cannot_be_freed(comm):
    x = comm.empty((4, 5))
    for wrong in (np.ones(3), "x", 5, [1.0], np.array(x)):
        with pytest.raises(mpidist.InvalidArgument, match=rf"rank {comm.rank}: free\(x\)"):
            comm.free(wrong)
    comm.free(x.T)
    with pytest.raises(mpidist.InvalidArgument, match="or was freed"):
        comm.free(x)
    x[:] = 1
    assert (comm.allreduce(x) == comm.size).all()


def begin(comm, collective, k, x, out, y):
    """Begin operation number k; `x`, `out` and `y` are symmetric, `y` p times as long."""
    p, r, root = comm.size, comm.rank, k % comm.size
    x[:], y[:] = r + k, np.repeat(np.arange(p), N) + k
    how = {"algorithm": "symmetric"}
    here = r == root
    return {
        "allreduce": lambda: comm.iallreduce(x, out=out, **how),
        "reduce": lambda: comm.ireduce(x, root=root, out=out if here else None, **how),
        "broadcast": lambda: comm.ibroadcast(x, root=root, **how),
        "allgather": lambda: comm.iallgather(x, out=y, **how),
        "gather": lambda: comm.igather(x, root=root, out=y if here else None, **how),
        "scatter": lambda: comm.iscatter(y if here else None, root=root, out=x, **how),
        "reduce_scatter": lambda: comm.ireduce_scatter(y, out=x, **how),
        "alltoall": lambda: comm.ialltoall(y, **how),
    }[collective]()


def expected(comm, collective, k):
    p, r, root = comm.size, comm.rank, k % comm.size
    added = p * (p - 1) / 2 + p * k
    return {
        "allreduce": added,
        "reduce": added if r == root else None,
        "broadcast": root + k,
        "allgather": np.repeat(np.arange(p), N) + k,
        "gather": np.repeat(np.arange(p), N) + k if r == root else None,
        "scatter": r + k,
        "reduce_scatter": p * (r + k),
        "alltoall": r + k,
    }[collective]


COLLECTIVES = [
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_several_at_once_in_the_background(comm, collective):
    """Each on arrays of its own, some of which are new from time to time; with blocking ones."""
    arrays = [[comm.empty(N), comm.empty(N), comm.empty(N * comm.size)] for _ in range(7)]
    source, whole = comm.empty(N), comm.empty(N * comm.size)
    for start in range(0, 70, 5):
        works = []
        for k in range(start, start + 5):
            works.append(begin(comm, collective, k, *arrays[k % 7]))
            comm.gather(source, out=whole if comm.rank == 0 else None, algorithm="symmetric")
        for k, work in zip(range(start, start + 5), works):
            got, want = work.wait(), expected(comm, collective, k)
            assert got is None if want is None else (got == want).all()
        if start % 3 == 0:
            arrays[start % 7] = [comm.empty(N), comm.empty(N), comm.empty(N * comm.size)]
