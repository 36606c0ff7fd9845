"""Sub-communicators, and nodes: real ones and pretended ones."""

import socket

import numpy as np
import pytest

from mpidist import CollectiveConfig, Communicator
from mpidist.errors import CollectiveMismatch, CommunicatorBroken, InvalidArgument
from tests.support import collectives as cases
from tests.support.pretended import on_nodes


def test_split(comm):
    p, rank = comm.size, comm.rank
    half = comm.split(rank % 2)
    members = list(range(rank % 2, p, 2))
    assert (half.rank, half.size) == (members.index(rank), len(members))
    assert half.allgather(rank).tolist() == members
    assert half.allreduce(1.0) == len(members)
    if half.size > 1:
        assert half.allreduce(rank, algorithm="ring") == sum(members)
    half.free()
    assert comm.allreduce(1) == p


def test_split_by_key(comm):
    p, rank = comm.size, comm.rank
    turned = comm.split(3, key=-rank)
    assert turned.rank == p - 1 - rank
    assert turned.allgather(rank).tolist() == list(range(p))[::-1]
    same = comm.split(0, key=7)
    assert same.rank == rank
    for made in (turned, same):
        made.free()


def test_split_off(comm):
    """A rank that says None is in none."""
    last = comm.size - 1
    sub = comm.split(None if comm.rank == last else 0)
    if comm.rank == last:
        assert sub is None
    else:
        assert sub.size == last and sub.allreduce(1, algorithm="linear") == last
        sub.free()


def test_split_of_a_split(comm):
    first = comm.split(comm.rank // 2)
    second = first.split(first.rank)
    assert second.size == 1 and second.allreduce(5) == 5
    second.barrier()
    second.free()
    first.free()


def test_split_takes_settings_along(comm):
    parent = Communicator(
        comm.backend.split(0, comm.rank),
        CollectiveConfig(local_allreduce="ring", timeout=17),
        segment_bytes=4096,
        debug=True,
    )
    child = parent.split(0)
    assert child.timeout == 17 and child.config.local_allreduce == "ring" and child._debug
    assert child._service.pipelining.segment_bytes == 4096
    if comm.size > 1:
        with pytest.raises(CollectiveMismatch, match="rank 0: barrier"):
            child.barrier() if child.rank == 0 else child.allreduce(1)
    assert child.allreduce(1) == comm.size  # still usable
    child.free()
    parent.free()


@pytest.mark.parametrize("color", [-1, 1.5, "a"])
def test_wrong_colors(comm, color):
    with pytest.raises(InvalidArgument, match=f"rank {comm.rank}: color="):
        comm.split(color)


def test_many_communicators(comm):
    """What is freed is given back: MPI has room for some thousands only."""
    for k in range(40):
        sub = comm.split(0)
        assert sub.allreduce(k) == k * comm.size
        sub.free()
        with pytest.raises(CommunicatorBroken, match=f"rank {comm.rank}: .*freed"):
            sub.split(0)


def test_topology_groups_ranks_by_host(comm):
    topology, hosts = comm.topology, comm.allgather_object(socket.gethostname())
    assert topology.rank == comm.rank and topology.size == comm.size
    together = {host: tuple(r for r in range(comm.size) if hosts[r] == host) for host in hosts}
    assert set(topology.groups) == set(together.values())
    assert topology.local_rank == together[hosts[comm.rank]].index(comm.rank)


@pytest.mark.parametrize("per_node", [1, 2])
def test_pretended_nodes(comm, per_node):
    """Every algorithm, with another grouping of ranks, and a board that shows only one node."""
    nodes = on_nodes(comm, per_node)
    topology = nodes.topology
    assert topology.num_nodes == -(-comm.size // per_node)
    assert topology.node_rank == comm.rank // per_node
    assert topology.local_rank == comm.rank % per_node
    for turn, (collective, name) in enumerate(cases.PAIRS):
        if cases.cannot(nodes, collective, name) is None:
            cases.CHECKS[collective](nodes, name, 11, "int64", turn % comm.size, bool(turn % 2))
    nodes.barrier()
    nodes.free()


def test_a_split_keeps_the_nodes(comm):
    nodes = on_nodes(comm, 2)
    odd = nodes.split(comm.rank % 2)
    assert odd.topology.num_nodes == odd.size
    assert odd.allreduce(np.ones(5), algorithm="native")[0] == odd.size
    odd.free()
    nodes.free()
