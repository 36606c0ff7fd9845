"""The MPI backend against what mpidist expects of any."""

import pytest
from mpi4py import MPI

from mpidist.backends.mpi import MpiBackend
from mpidist.testing import check_backend
from mpidist.topology import pretended_hosts


def test_conformance(comm):
    made = []

    def make():
        made.append(MpiBackend(comm.backend.comm))
        return made

    assert len(check_backend(make)) == 11
    made[0].close()


def test_conformance_over_nodes(comm):
    """Ranks of other nodes are not on the board: they are asked."""
    hosts = pretended_hosts(comm.size, {"MPIDIST_RANKS_PER_NODE": "1"})
    assert len(check_backend(lambda: [MpiBackend(comm.backend.comm, hosts)])) == 11


@pytest.mark.one_node
@pytest.mark.mpi(min_size=2)
def test_rules_of_each_library(comm):
    """What is measured on one library says little about another: here the tables differ."""
    vendor, crowded = comm.backend.vendor, comm.backend.crowded
    assert vendor == MPI.get_vendor()[0] and comm.backend.library.startswith(f"{vendor} ")
    collective, nbytes = ("alltoall", 896 << 10) if crowded else ("allreduce", 1 << 20)
    way = comm.explain(collective, nbytes)[0]
    assert way.name == ("staged" if vendor == "MPICH" else "native")
    assert way.why.startswith(f"shipped rule: {way.name}")


def test_tag_limit_after_split(comm):
    """Open MPI knows the limit of tags of MPI_COMM_WORLD only."""
    part = comm.split(comm.rank % 2)
    assert part.backend.tag_limit == comm.backend.tag_limit > 32767
    part.free()
