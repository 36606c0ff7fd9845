"""Private arrays that the ranks read in each other's memory: the results, and bits, of messages."""

import os
import time

import numpy as np
import pytest

import mpidist
from mpidist.backends import process_memory
from mpidist.engine import rooted

pytestmark = pytest.mark.one_node

SIZES = (0, 1, 7, 1009, 20_011, 300_007)  # one piece and several, and no multiple of anything
WAY = {"algorithm": "single_copy"}
COLLECTIVES = ("allreduce", "reduce", "reduce_scatter")
REFUSED = "the ranks cannot read each other's memory"


@pytest.fixture
def reached(comm):
    """The communicator, where the machine lets its ranks read each other's memory."""
    try:
        comm.allreduce(np.ones(1), **WAY)
    except mpidist.Unsupported as error:
        pytest.skip(str(error)[str(error).index(REFUSED) :])
    return comm


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_the_bits_of_direct(reached, n, op):
    comm = reached
    random = np.random.default_rng(comm.rank)
    x = np.empty(n, "float32")
    for k in range(3):
        x[:] = random.random(n, dtype="float32") - 0.5
        expected = comm.allreduce(x, op, algorithm="direct").tobytes()
        assert comm.allreduce(x, op, **WAY).tobytes() == expected
        got = comm.reduce(x, op, root=k % comm.size, **WAY)
        assert got is None if comm.rank != k % comm.size else got.tobytes() == expected
        assert comm.allreduce(x, op, out=x, **WAY) is x and x.tobytes() == expected


@pytest.mark.parametrize("n", SIZES)
def test_slices_of_every_rank(reached, n):
    comm = reached
    counts = [n + (3 * r) % 5 for r in range(comm.size)]
    mine = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
    everyone = [np.arange(sum(counts)) * (r + 1) for r in range(comm.size)]
    x = everyone[comm.rank].copy()
    for _ in range(3):
        assert (comm.reduce_scatter(x, counts=counts, **WAY) == sum(everyone)[mine]).all()
    comm.reduce_scatter(x, counts=counts, out=x[mine], **WAY)
    assert (x[mine] == sum(everyone)[mine]).all()
    assert (np.delete(x, mine) == np.delete(everyone[comm.rank], mine)).all()


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint64", "complex128", "bool"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_kind_of_number(reached, collective, dtype):
    comm = reached
    x = ((np.arange(4096 * comm.size) + comm.rank) % 3).astype(dtype)
    op = "or" if dtype == "bool" else "sum"
    expected = comm.allreduce(x, op, algorithm="direct")
    if collective == "reduce_scatter":
        expected = np.split(expected, comm.size)[comm.rank]
    got = getattr(comm, collective)(x, op, **WAY)
    assert (got is None) == (collective == "reduce" and comm.rank != 0)
    if got is not None:
        assert got.dtype == x.dtype and got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("in_place", [False, True])
def test_no_write_while_others_read(reached, in_place):
    """Calls in a row, each on new values in the same and in other arrays."""
    comm, p = reached, reached.size
    x = np.empty(9001, "int64")
    for k in range(200):
        x[:] = k + comm.rank
        total = p * k + p * (p - 1) // 2
        assert (comm.allreduce(x, out=x if in_place else None, **WAY) == total).all()
        x[:] = -1
        assert (comm.reduce_scatter(np.full(p * 50, k), **WAY) == p * k).all()
        got = comm.reduce(np.full(77, k), root=k % p, **WAY)
        assert got is None or (got == p * k).all()


def test_other_kinds_of_arrays(reached):
    comm, p = reached, reached.size
    wide = np.full((40, 60), comm.rank + 1)
    total = p * (p + 1) // 2
    assert (comm.allreduce(wide[:, ::2], **WAY) == total).all()
    out = np.zeros((60, 40), int).T
    comm.allreduce(wide, out=out, **WAY)
    assert (out == total).all() and (wide == comm.rank + 1).all()
    wide.flags.writeable = False
    assert (comm.allreduce(wide, **WAY) == total).all()
    x = comm.empty(100, "int64") if p > 1 else np.empty(100, "int64")
    x[:] = comm.rank + 1
    assert (comm.allreduce(x, **WAY) == total).all()


def test_noncommuting_user_function(reached):
    def second(a, b):
        return b + 0 * a

    x = np.full(300_000, reached.rank, "float64")
    got = reached.allreduce(x, second, commute=False, **WAY)
    assert (got == reached.size - 1).all()


def test_refusals(comm):
    with pytest.raises(mpidist.Unsupported, match="there is no allgather by single copies"):
        comm.allgather(np.ones(5), **WAY)
    with pytest.raises(mpidist.Unsupported, match="background"):
        comm.iallreduce(np.ones(5), **WAY)
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_it_is_told_apart_from_other_ways(reached):
    made = reached.split(0)
    made.allreduce(np.ones(10), **WAY)  # tries it, together
    name = "single_copy" if made.rank else "native"
    with pytest.raises(mpidist.CollectiveMismatch, match="allreduce"):
        made.allreduce(np.ones(10), algorithm=name)
    assert made.allreduce(np.ones(10), **WAY)[0] == made.size


def refuse(comm, why):
    """The candidate is refused on all ranks alike, and what "auto" takes instead works."""
    with pytest.raises(mpidist.Unsupported, match=f"{REFUSED}: .*{why}"):
        comm.allreduce(np.ones(10), **WAY)
    every = comm.explain("allreduce", 4 << 20)[1]
    candidate = next(candidate for candidate in every if candidate.name == "single_copy")
    assert not candidate.can and REFUSED in candidate.why
    x = np.full(4 << 20, comm.rank + 1.0, "float32")
    assert (comm.allreduce(x) == comm.size * (comm.size + 1) / 2).all()
    assert comm.explain("allreduce", x.nbytes)[0].name != "single_copy"


@pytest.mark.mpi(min_size=2)
def test_one_rank_that_may_not_read(comm, monkeypatch):
    made = comm.split(0)

    def forbidden():
        raise mpidist.Unsupported("this system has no process_vm_readv")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(process_memory, "_function", forbidden)
    refuse(made, f"rank {comm.size - 1}: this system has no process_vm_readv")


@pytest.mark.mpi(min_size=2)
def test_process_numbers_of_other_processes(reached, monkeypatch):
    """As in containers that number their processes by themselves."""
    made = reached.split(0)
    numbers = made.allgather_object(os.getpid())
    wrong = numbers[(made.rank + 1) % made.size]
    monkeypatch.setattr(process_memory, "process_number", lambda: wrong)
    refuse(made, "rank 0: .*rank 1")


@pytest.mark.mpi(min_size=2)
def test_an_address_of_nothing_is_an_error(reached):
    """No rank goes on with what it has not read."""
    memory = process_memory.connect(reached.rank, range(reached.size), reached.allgather_object)
    mine = np.full(8, 7, "int64")
    peer = (reached.rank + 1) % reached.size
    with pytest.raises(OSError, match=f"0 of 64 bytes .* rank {peer}"):
        memory.read(peer, 8, mine.ctypes.data, mine.nbytes)
    assert (mine == 7).all()
    reached.barrier()


@pytest.mark.parametrize("collective", ["reduce", "gather"])
def test_ranks_that_are_ahead_do_not_change_what_the_root_still_reads(
    reached, monkeypatch, collective
):
    """The notes of a single copy are no flags that the root of the call before it must serve."""
    comm = reached

    class Late(rooted.ConditionalAction):
        def __call__(self):
            if comm.rank == 0:
                time.sleep(0.1)
            return super().__call__()

    monkeypatch.setattr(rooted, "ConditionalAction", Late)
    count, root = 1 << 15, comm.rank == 0
    x, out, private = comm.empty(count), comm.empty(count * comm.size), np.ones(count)
    x[...], out[...] = comm.rank + 1, -1
    out = out if collective == "gather" else out[:count]
    result = getattr(comm, collective)(x, out=out if root else None, algorithm="symmetric")
    comm.allreduce(private, **WAY)
    ranks = np.arange(1, comm.size + 1)
    expected = np.repeat(ranks, count) if collective == "gather" else ranks.sum()
    assert not root or (result == expected).all()
