"""Communicators that pretend to be on several nodes of this machine."""

from mpidist import Communicator
from mpidist.backends.mpi import MpiBackend
from mpidist.topology import pretended_hosts


def on_nodes(comm, per_node, config=None, **options):
    """A communicator of the same ranks that pretends to have so many of them on each node."""
    hosts = pretended_hosts(comm.size, {"MPIDIST_RANKS_PER_NODE": str(per_node)})
    return Communicator(MpiBackend(comm.backend.comm, hosts), config, **options)
