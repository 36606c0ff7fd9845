"""Measurements under mpiexec: what simulated ranks have not, symmetric memory."""

import pytest

from mpidist.bench import Settings, measure, run_benchmark
from mpidist.schedule import COLLECTIVES


@pytest.mark.one_node
def test_refusals_name_their_memory(comm):
    settings = Settings(sizes=[64], algorithms=["ring"], memory="both", limit=0.0, iterations=1)
    results = measure(comm, ["allreduce"], settings)
    assert not results.rows
    refused = {(one.candidate, one.memory) for one in results.unsupported}
    assert refused >= {("ring", "private"), ("ring", "symmetric")}
    assert all(" s" in one.reason and one.bytes for one in results.unsupported)


@pytest.mark.one_node
@pytest.mark.parametrize("names", [["auto", "symmetric", "ring"], ["ring"]])
def test_auto_is_measured_in_both_memories(comm, names):
    settings = Settings(sizes=[64, 4096], algorithms=names, memory="auto", iterations=3)
    results = run_benchmark(comm, ["allreduce", "barrier"], settings)
    measured = {(row.candidate, row.memory) for row in results.rows if row.work == "allreduce"}
    assert {row.memory for row in results.rows if row.work == "barrier"} == {"private"}
    assert "stream" not in results.header
    if "auto" not in names:
        assert {memory for _, memory in measured} == {"private"} and not any(
            "comm.empty" in note for note in results.notes
        )
        return
    assert measured == {
        *(("mpi4py", "private"), ("ring", "private"), ("auto", "private")),
        *(("auto", "symmetric"), ("symmetric", "symmetric")),
    }
    for memory in ("private", "symmetric"):
        ratios = sorted(
            row.ratio
            for row in results.rows
            if (row.work, row.candidate, row.memory) == ("allreduce", "auto", memory)
        )
        (note,) = [note for note in results.notes if note.startswith(memory)]
        least, most = (f"{ratio:.2f}" for ratio in ratios)
        assert least in note and most in note


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", list(COLLECTIVES))
def test_every_collective_beside_mpi4py(comm, collective, in_place):
    """The bare call and ours have the same data, and both results are checked."""
    settings = Settings(
        sizes=[1000], algorithms=["native"], iterations=3, in_place=in_place, root=comm.size - 1
    )
    results = measure(comm, [collective], settings)
    assert {row.candidate for row in results.rows} == {"mpi4py", "native"}
    assert all(row.correct for row in results.rows) and not results.unsupported
