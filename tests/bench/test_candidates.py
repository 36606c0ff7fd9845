"""The candidates of a measurement."""

import pytest

from mpidist import run_simulated
from mpidist.bench.candidates import Candidate, candidates
from mpidist.errors import InvalidArgument, Unsupported
from mpidist.schedule import algorithms
from tests.support.bench_kits import bench


def test_candidates_of_each_memory():
    def of(*args):
        return run_simulated(1, lambda comm: candidates(comm, *args))[0]

    every = {a.name for a in algorithms("allgather")}
    private = of("allgather", None, "private")
    assert private[0] == Candidate("mpi4py", "private")
    assert {c.name for c in private} >= every | {"native", "auto"}
    assert all(c.memory == "private" and c.name != "symmetric" for c in private)
    symmetric = of("allgather", None, "symmetric")
    assert symmetric[:2] == [Candidate("mpi4py"), Candidate("native")]
    assert {c.name for c in symmetric[2:]} >= every | {"native", "auto", "symmetric"}
    assert {c.memory for c in symmetric[2:]} == {"symmetric"}
    both = of("allgather", None, "both")
    assert set(both) == set(private) | set(symmetric) and len(both) == len(set(both))
    assert of("allgather", ["ring"], "symmetric")[2:] == [Candidate("ring", "symmetric")]
    # Simulated ranks have no symmetric memory, so "auto" is private there, and no error.
    assert set(of("allgather", None, "auto")) == set(private)


def test_candidates_memory_that_is_missing_is_refused():
    with pytest.raises(InvalidArgument, match="memory='shared': .*auto, private, symmetric, both"):
        bench(1, ["allreduce"], memory="shared")
    with pytest.raises(Unsupported, match="no shared memory"):
        bench(2, ["allreduce"], memory="symmetric")
