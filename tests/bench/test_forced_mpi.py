"""The MPI library's algorithms, forced one by one in a running job."""

import json

import pytest
from mpi4py import MPI

from mpidist.bench.cases import Workload
from mpidist.bench.forced import Forced, measure, own_tree, sum_bits
from mpidist.errors import Unsupported
from mpidist.interchange import openmpi
from mpidist.interchange.library_rules import DEFAULT, MEASURED, LibraryRule, of_entry

VENDOR = MPI.get_vendor()[0]
NAMES = {"allreduce": ["recursive_doubling", "ring"], "reduce": ["binomial"]}


def rule(ranks, algorithm, collective="allreduce"):
    return LibraryRule(collective, ranks, 2000, 2051, algorithm, MEASURED, (1.5, 1.5))


def test_measure_times_every_algorithm_and_the_default(comm):
    for budget in (0.8, 8, 60):  # on a machine that is held up, a race leaves out the last ones
        found = measure(comm, VENDOR, NAMES, [64, 4096], budget=budget)
        times = [(e.key.collective, times) for e in found.entries for times in e.times.values()]
        if all(len(names) > len(NAMES[name]) for name, names in times):  # equal on all ranks
            break
    assert found.wrong == []
    assert [entry.key.collective for entry in found.entries] == ["allreduce", "reduce"]
    for entry in found.entries:
        assert sum(entry.key.ranks_per_node) == comm.size and sorted(entry.times) == [64, 4096]
        for times in entry.times.values():
            names = {DEFAULT, *NAMES[entry.key.collective]}
            assert set(times) == names and min(times.values()) > 0
        for one in of_entry(entry, MEASURED):
            assert one.gains[0] > 1, "slower than the library's choice"
    assert found.about["ranks"] == comm.size
    assert comm.allreduce(1.0) == comm.size


def test_measure_on_a_busy_machine_only_if_wanted(comm, monkeypatch):
    monkeypatch.setattr("mpidist.bench.machine.busy_cores", lambda comm: [("here", 8, 4.0)])
    words = (comm, VENDOR, {"allreduce": ["ring"]}, [64], 0.1)
    assert measure(*words, busy_too=False).entries == []
    for found in (measure(*words), measure(*words, busy_too=False)):
        assert found.busy and "here" in found.doubts[0]


def test_forced_names_are_the_librarys(comm):
    forced = Forced(comm, VENDOR)
    names = forced.names("allreduce")
    assert names[0] == DEFAULT and {"recursive_doubling", "ring"} < set(names)
    if VENDOR == "Open MPI":
        assert ("two_proc" in forced.names("allgather")) == (comm.size == 2)
    forced.close()


@pytest.mark.skipif(VENDOR != "Open MPI", reason="needs Open MPI")
@pytest.mark.mpi(min_size=3)
def test_algorithm_that_refuses_the_call_is_unsupported(comm):
    """Open MPI's allgather for two ranks is an error on others."""
    forced = Forced(comm, VENDOR)
    forced.names("allgather")
    case = Workload("allgather", comm.rank, comm.size, 0, 64, "float32").case(64)
    with pytest.raises(Unsupported, match="allgather of .* B: MPI_ERR"):
        forced.candidate("allgather", "two_proc").runner(comm, case)
    forced.close()
    assert comm.allreduce(1.0) == comm.size


@pytest.mark.skipif(VENDOR != "Open MPI", reason="needs Open MPI")
def test_other_numbers_than_the_files_are_unsupported(comm, monkeypatch):
    forced = Forced(comm, VENDOR)
    monkeypatch.setattr(openmpi, "number", lambda collective, algorithm: 77)
    with pytest.raises(Unsupported, match="allreduce: .* has number 1: expected 77"):
        forced.names("allreduce")


@pytest.mark.mpi(min_size=3)
def test_sum_bits_tell_algorithms_apart(comm):
    """Without a file the library chooses recursive doubling at 2 KB, and not the ring."""
    rules = [rule(comm.size, "ring"), rule(comm.size + 1, "ring")]
    found = sum_bits(comm, VENDOR, [*rules, rule(comm.size, "ring", "allgather")])
    assert [(line.rule, line.nbytes) for line in found] == [(rules[0], 2000), (rules[0], 2048)]
    for line in found:
        assert line.bare == line.forced["recursive_doubling"] != line.forced["ring"]
        assert DEFAULT not in line.forced


@pytest.mark.skipif(VENDOR != "MPICH", reason="needs MPICH")
def test_own_tree_is_in_the_library(comm):
    tree = json.loads(own_tree(comm))
    assert {"collective=allreduce", "collective=scan"} < set(tree)
    assert "comm_type=intra" in tree["collective=reduce_scatter_block"]
