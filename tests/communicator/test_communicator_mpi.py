"""Every collective, by every algorithm and natively: every root, segments, bits, mismatches."""

import time

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.errors import CollectiveMismatch
from mpidist.schedule import algorithms
from tests.support import collectives as cases

each_pair = pytest.mark.parametrize(("collective", "name"), cases.PAIRS)


@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_native_collective_of_any_length_and_in_place(comm, collective):
    cases.check_lengths(comm, collective, "native")


@pytest.mark.parametrize(
    ("collective", "name"), [pair for pair in cases.PAIRS if pair[0] in cases.ROOTED]
)
def test_collective_with_every_root(comm, collective, name):
    for root in range(comm.size):
        cases.check(comm, collective, name, comm.size + 2, "float64", root, root % 2 == 0)


@each_pair
def test_collective_in_segments(comm, collective, name):
    """Blocks longer than a segment are pipelined: 1009 elements are 127 segments."""
    small = Communicator(comm.backend.split(0, comm.rank), segment_bytes=64, window=3)
    cases.check(small, collective, name, 1009, "int64", comm.size - 1, False)
    cases.check(small, collective, name, 1009, "int64", 0, True)
    small.free()


@pytest.mark.parametrize("name", cases.names("barrier"))
def test_barrier_waits_for_the_last(comm, name):
    """No rank leaves before the last has come, whoever that is; one clock serves all ranks."""
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.01)
        came = time.clock_gettime(time.CLOCK_MONOTONIC)
        comm.barrier(algorithm=name)
        left = time.clock_gettime(time.CLOCK_MONOTONIC)
        assert comm.allreduce(came, "max") <= comm.allreduce(left, "min")


@pytest.mark.parametrize("collective", list(cases.CHECKS))
def test_algorithms_give_what_native_gives(comm, collective):
    """The same integers from every algorithm: bit by bit what the library computes."""
    p, random = comm.size, np.random.default_rng(comm.rank)
    x = random.integers(-(2**40), 2**40, 60 * p)
    call = getattr(comm, collective)
    extra = {"root": p - 1} if collective in cases.ROOTED else {}
    results = {}
    for name in cases.names(collective):
        if cases.cannot(comm, collective, name) is None:
            results[name] = call(x.copy(), algorithm=name, **extra)
    for name, result in results.items():
        np.testing.assert_array_equal(result, results["native"], err_msg=name)
    assert len(results) >= 2


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_reduction_has_the_same_bits_on_all_ranks(comm, collective):
    """Float sums depend on the order of addition: it must be one and the same everywhere."""
    p, random = comm.size, np.random.default_rng(7 + comm.rank)
    x = (random.normal(size=211 * p) * 10.0 ** random.integers(-8, 8, 211 * p)).astype("f4")
    for algorithm in algorithms(collective):
        if algorithm.unsupported(p, groups=comm.topology.groups) is None:
            first = getattr(comm, collective)(x, algorithm=algorithm.name)
            again = getattr(comm, collective)(x.copy(), algorithm=algorithm.name)
            assert (first is None) == (again is None)
            if first is not None:
                assert first.tobytes() == again.tobytes()
            if collective == "allreduce":
                everyone = comm.allgather(first.view("i4"))
                assert (everyone.reshape(p, -1) == everyone[: x.size]).all(), algorithm.name


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["auto", "native", "pairwise"])
def test_alltoall_tables_of_counts_that_differ_are_refused(comm, algorithm):
    """Each rank's own part may look right: the ranks compare the whole table."""
    part = Communicator(comm.backend.split(0, comm.rank))
    table = np.ones((comm.size, comm.size), int)
    table[0, 1] = 1 if part.rank else 40_000
    room = np.full(50_000, -1.0)
    out = room[: table[:, part.rank].sum()]
    with pytest.raises(CollectiveMismatch, match="table="):
        part.alltoall(np.ones(table[part.rank].sum()), out, algorithm, counts=table)
    assert (room[len(out) :] == -1).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
@pytest.mark.parametrize("name", ["allreduce", "allgather"])
def test_collective_shapes_that_differ_are_refused(comm, name, algorithm):
    """(2, 3) and (3, 2) have as many elements; axes of length 1 do not count."""
    part = Communicator(comm.backend.split(0, comm.rank))
    shape = (3, 2) if part.rank else (2, 3)
    with pytest.raises(CollectiveMismatch, match=r"\(\d(, \d|,)\)"):
        getattr(part, name)(np.ones(shape), algorithm=algorithm)
    assert comm.allreduce(np.ones((1, 3) if comm.rank else (3,))).shape[-1] == 3
