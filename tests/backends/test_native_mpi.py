"""The MPI library's own operations are used where a trial shows numpy's arithmetic."""

import numpy as np
import pytest
from mpi4py import MPI

from mpidist.backends import native
from mpidist.operations import OPS, extreme_values

pytestmark = pytest.mark.mpi


def wrong(change):
    """An operation of MPI that differs from a sum of int32 as `change` does it."""

    def combine(incoming, result, _):
        left, right = np.frombuffer(incoming, "i4"), np.frombuffer(result, "i4")
        right += left
        change(right, left)

    return MPI.Op.Create(combine, True)


def last_of_a_vector(right, left):
    right[8:9] += 1


def of_limits(right, left):
    right[left == np.iinfo("i4").max] = np.iinfo("i4").max


@pytest.mark.parametrize(
    ("change", "agrees"),
    [(lambda right, left: None, True), (last_of_a_vector, False), (of_limits, False)],
)
def test_an_operation_that_differs_from_numpys_is_not_used(comm, change, agrees):
    operation = wrong(change)
    found = native._agrees(operation, MPI.INT32_T, OPS["sum"], np.dtype("i4"))
    operation.Free()
    assert found is agrees


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
def test_signed_comparison_of_unsigned_numbers_is_noticed(comm, dtype):
    """Open MPI 4.1.4 and MPICH 4.0.2 compare them so."""
    signed = dtype.replace("u", "i")

    def combine(incoming, result, _):
        left, right = np.frombuffer(incoming, signed), np.frombuffer(result, signed)
        np.maximum(left, right, out=right)

    operation = MPI.Op.Create(combine, True)
    datatype = native.mpi_datatype(np.dtype(dtype))
    found = native._agrees(operation, datatype, OPS["max"], np.dtype(dtype))
    operation.Free()
    assert not found
    assert extreme_values(np.dtype(dtype)).max() == np.iinfo(dtype).max


@pytest.mark.parametrize("dtype", ["f8", "f2"])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_to_another_root_without_in_place(comm, monkeypatch, dtype, in_place):
    """MPICH 3.4 to 4.1.2 crash there: the call gets a copy of the root's input."""
    monkeypatch.setattr(native, "_crashes_in_place", lambda: True)
    sources = []
    bound = native.NativeCollectives._bound

    def seen(self, call, form):
        found = bound(self, call, form)
        sources.append(found[1])
        return found

    monkeypatch.setattr(native.NativeCollectives, "_bound", seen)
    root, x = comm.size - 1, np.full(5000, comm.rank + 1, dtype)
    out = x if in_place and comm.rank == root else None
    got = comm.reduce(x, out=out, root=root, algorithm="native")
    if comm.rank == root:
        assert (got == comm.size * (comm.size + 1) / 2).all()
    if root:
        assert MPI.IN_PLACE not in sources and sources


@pytest.mark.parametrize(
    ("vendor", "version", "crashes"),
    [
        *[("MPICH", (3, 4, 3), True), ("MPICH", (4, 0, 3), True), ("MPICH", (4, 1, 3), False)],
        *[("MPICH", (5, 0, 2), False), ("Open MPI", (4, 1, 4), False)],
    ],
)
def test_the_libraries_that_crash(monkeypatch, vendor, version, crashes):
    """In a reduce in place to another root than 0: MPICH before 4.1.3."""
    monkeypatch.setattr(MPI, "get_vendor", lambda: (vendor, version))
    assert native._crashes_in_place.__wrapped__() == crashes


@pytest.mark.parametrize("form", ["rows", "table", "objects"])
def test_uneven_alltoall_with_too_many_elements_on_some_ranks(comm, monkeypatch, form):
    """Before MPI 4: no rank may take MPI's own call if it cannot serve another one's."""
    monkeypatch.setattr(native, "_COUNT_LIMIT", 1000)
    monkeypatch.setattr(MPI, "Get_version", lambda: (3, 1))
    size, rank = comm.size, comm.rank
    table = np.ones((size, size), int)
    table[0, -1] = 2000
    if form == "objects":
        got = comm.alltoall_object([bytes([rank]) * n for n in table[rank]])
        assert [set(one) for one in got] == [{r} for r in range(size)]
        assert list(map(len, got)) == table[:, rank].tolist()
    else:
        x = np.full(table[rank].sum(), rank)
        got = comm.alltoall(x, counts=table if form == "table" else table[rank])
        np.testing.assert_array_equal(got, np.repeat(np.arange(size), table[:, rank]))
