"""Private arrays through slots of shared memory: the results, and the bits, of messages."""

import numpy as np
import pytest

import mpidist

pytestmark = pytest.mark.one_node

SIZES = (0, 1, 7, 1009, 20_011, 70_001, 300_007)  # one shot and two, and no multiple of anything


def data(rank, n, dtype="float32"):
    return (((np.arange(n) * 7 + rank * 3) % 11) / 8).astype(dtype)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("collective", ["allreduce", "reduce"])
def test_reductions_have_the_bits_of_direct(comm, collective, n):
    random = np.random.default_rng(comm.rank)
    x = np.empty(n, "float32")
    call = getattr(comm, collective)
    for op in ("sum", "mean", "max"):
        for _ in range(3):
            x[:] = random.random(n, dtype="float32") - 0.5
            expected = comm.allreduce(x, op, algorithm="direct")
            got = call(x, op, algorithm="staged")
            if got is not None:
                assert got.tobytes() == expected.tobytes()
        if collective == "allreduce":
            assert comm.allreduce(x, op, out=x, algorithm="staged") is x
            assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("n", SIZES[:-1])
def test_every_root(comm, n):
    parts = [data(r, n) for r in range(comm.size)]
    for root in range(comm.size):
        here = comm.rank == root
        x = data(comm.rank, n)
        got = comm.reduce(x, "max", root=root, algorithm="staged")
        assert (got == np.max(parts, axis=0)).all() if here else got is None
        got = comm.gather(x, root=root, algorithm="staged")
        assert (got == np.concatenate(parts)).all() if here else got is None
        comm.broadcast(x, root=root, algorithm="staged")
        assert (x == parts[root]).all()
        out = np.full(n, -1, "float32")
        whole = np.concatenate(parts) if here else None
        comm.scatter(whole, root=root, out=out, algorithm="staged")
        assert (out == parts[comm.rank]).all()


@pytest.mark.parametrize("n", (0, 1, 7, 1009, 9_001))
def test_all_to_all(comm, n):
    p, r = comm.size, comm.rank
    x = np.arange(n * p) + 1000 * r
    everyone = [np.arange(n * p) + 1000 * peer for peer in range(p)]
    for _ in range(3):
        mine = slice(r * n, (r + 1) * n)
        got = comm.alltoall(x, algorithm="staged")
        assert (got == np.concatenate([e[mine] for e in everyone])).all()
        assert (comm.allgather(x, algorithm="staged") == np.concatenate(everyone)).all()
        assert (comm.reduce_scatter(x, algorithm="staged") == sum(everyone)[mine]).all()


def test_uneven_counts(comm):
    counts = [(3 * r) % 5 for r in range(comm.size)]
    parts = [data(r, c) for r, c in enumerate(counts)]
    mine = parts[comm.rank]
    whole = np.concatenate(parts)
    assert (comm.allgather(mine, counts=counts, algorithm="staged") == whole).all()
    x = data(comm.rank, sum(counts))
    start = sum(counts[: comm.rank])
    total = sum(data(r, sum(counts)) for r in range(comm.size))
    got = comm.reduce_scatter(x, counts=counts, algorithm="staged")
    assert (got == total[start : start + counts[comm.rank]]).all()


def test_slots_are_not_written_while_others_read(comm):
    """Two of three allgathers are followed by a broadcast, in which a rank may run ahead.

    One that runs ahead must not overwrite a slot that a slower one still reads; nor without the
    broadcast, where one allgather follows another.
    """
    x = np.empty(5000, "int64")
    for k in range(400):
        x[:] = k + comm.rank
        got = comm.allgather(x, algorithm="staged")
        if k % 3:
            comm.broadcast(np.array([k]), root=k % comm.size, algorithm="linear")
        assert (got.reshape(comm.size, -1) == k + np.arange(comm.size)[:, None]).all()


def test_noncommuting_user_function(comm):
    def second(a, b):
        return b + 0 * a

    x = np.full(9000, comm.rank, "float64")
    got = comm.allreduce(x, second, commute=False, algorithm="staged")
    assert (got == comm.size - 1).all()


@pytest.mark.parametrize("n", ((2 << 20) + 1, 5_000_011))
def test_array_larger_than_a_slot(comm, n):
    x = np.arange(n, dtype="uint8") + np.uint8(comm.rank)
    most = np.max([np.arange(n, dtype="uint8") + np.uint8(rank) for rank in range(comm.size)], 0)
    for _ in range(3):
        assert np.array_equal(comm.allreduce(x, "max", algorithm="staged"), most)
        sent = comm.broadcast(x.copy(), root=comm.size - 1, algorithm="staged")
        assert np.array_equal(sent, x + np.uint8(comm.size - 1 - comm.rank))
    with pytest.raises(mpidist.Unsupported, match="2 MiB"):
        comm.allreduce(x, "max", algorithm="slots_one_shot")
    with pytest.raises(mpidist.Unsupported, match="exceed 16 MiB.*algorithm='slots'"):
        comm.broadcast(np.zeros(3 << 20), algorithm="staged")
    with pytest.raises(mpidist.Unsupported, match="background"):
        comm.iallreduce(x[:100], "max", algorithm="staged")
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_it_is_told_apart_from_other_ways(comm):
    made = comm.split(0)
    made.allreduce(np.ones(10), algorithm="staged")  # makes the slots, together
    name = "staged" if comm.rank else "native"
    with pytest.raises(mpidist.CollectiveMismatch, match="allreduce"):
        made.allreduce(np.ones(10), algorithm=name)
    assert made.allreduce(np.ones(10), algorithm="staged")[0] == comm.size


@pytest.mark.parametrize("name", ("staged", "slots", "published", "symmetric", "in_place"))
@pytest.mark.parametrize("collective", ("scan", "exscan"))
def test_scans(comm, collective, name):
    """In place or not, first and repeated, short and long; a user's operation keeps its order."""
    empty = comm.empty if name in ("symmetric", "in_place") else np.empty
    call, before = getattr(comm, collective), range(comm.rank + (collective == "scan"))
    for n in (0, 1, 5000):
        x, out = empty(n, "float64"), empty(n, "float64")
        for turn in range(4):
            x[:], out[:] = np.arange(n) + comm.rank + turn, 77
            want = sum(np.arange(n) + rank + turn for rank in before)
            got = call(x, out=out, algorithm=name)
            assert (out == (want if before else 77)).all() and (got is None) == (not before)
            assert (x == np.arange(n) + comm.rank + turn).all()
            call(x, out=x, algorithm=name)
            assert len(before) == 0 or (x == want).all()
    first = mpidist.Op(lambda left, right: left, commute=False)
    x, out = empty(9, "float64"), empty(9, "float64")
    x[:] = comm.rank
    call(x, first, out=out, algorithm=name)
    assert len(before) == 0 or (out == 0).all()
