"""The MPI backend against what mpidist expects of any."""

from mpidist.backends.mpi import MpiBackend
from mpidist.launch import pretended_hosts
from mpidist.testing import check_backend


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
