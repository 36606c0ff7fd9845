"""Topology, pure data about who shares a node with whom, and grids of ranks."""

import numpy as np
import pytest

from mpidist.errors import ConfigError, InvalidArgument, InvalidRank, Unsupported
from mpidist.topology import Grid, Topology


def from_hosts(rank, hosts, **environ):
    return Topology.from_hosts(rank, hosts, environ)


def test_one_node():
    t = from_hosts(2, ["a"] * 4)
    assert t.groups == ((0, 1, 2, 3),) and t.size == 4
    assert (t.num_nodes, t.node_rank, t.local_rank, t.local_size) == (1, 0, 2, 4)
    assert t.node == (0, 1, 2, 3)
    assert t.is_even and t.lanes == ((0,), (1,), (2,), (3,))


def test_scattered_hosts_are_ordered_by_first_rank():
    t = from_hosts(3, ["b", "a", "b", "a", "c"])
    assert t.groups == ((0, 2), (1, 3), (4,))
    assert (t.node, t.node_rank, t.local_rank, t.local_size) == ((1, 3), 1, 1, 2)
    assert not t.is_even
    with pytest.raises(Unsupported, match="rank 3.*2, 2, 1"):
        t.lanes  # noqa: B018


def test_lanes():
    assert from_hosts(0, "abab").lanes == ((0, 1), (2, 3))
    assert from_hosts(0, "aabb").lanes == ((0, 2), (1, 3))


def test_pretended_nodes():
    t = from_hosts(4, ["a"] * 5, MPIDIST_RANKS_PER_NODE="2")
    assert t.groups == ((0, 1), (2, 3), (4,)) and t.local_size == 1
    assert from_hosts(0, "aab", MPIDIST_RANKS_PER_NODE="").groups == ((0, 1), (2,))


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_bad_pretence(value):
    with pytest.raises(ConfigError, match=f"MPIDIST_RANKS_PER_NODE='{value}'.*> 0"):
        from_hosts(1, "aa", MPIDIST_RANKS_PER_NODE=value)


def test_bad_groups():
    with pytest.raises(InvalidArgument, match="exactly one"):
        Topology(0, ((0, 1), (1, 2)))
    with pytest.raises(InvalidArgument, match="exactly one"):
        Topology(0, ((0, 2),))
    with pytest.raises(InvalidRank) as error:
        Topology(2, ((0, 1),))
    assert (error.value.rank, error.value.size) == (2, 2)
    assert Topology(0, ((2, 1), (0, 3))).groups == ((0, 3), (1, 2))


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_grid_has_rows_and_columns(comm):
    for data in (d for d in range(1, comm.size + 1) if comm.size % d == 0):
        grid = Grid(comm, data=data)
        assert grid.shape == (data, comm.size // data)
        assert (grid.data.size, grid.pipe.size) == grid.shape
        assert (grid.data.rank, grid.pipe.rank) == (grid.data_index, grid.pipe_index)
        assert comm.rank == grid.pipe_index * data + grid.data_index
        same_stage = np.arange(data) + grid.pipe_index * data
        np.testing.assert_array_equal(grid.data.allgather(np.array([comm.rank])), same_stage)
        same_replica = np.arange(comm.size // data) * data + grid.data_index
        np.testing.assert_array_equal(grid.pipe.allgather(np.array([comm.rank])), same_replica)
    assert Grid(comm, data=-1, pipe=comm.size).shape == (1, comm.size)


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_grid_bad_shapes_are_refused(comm):
    size = comm.size
    for sides in ({"data": size + 1}, {"data": 2, "pipe": size}, {"pipe": 0}, {}, {"data": True}):
        with pytest.raises(ConfigError, match=f"rank {comm.rank}.* on {size} ranks"):
            Grid(comm, **sides)
