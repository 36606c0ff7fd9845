"""Topology: pure data about who shares a node with whom."""

import pytest

from mpidist.errors import ConfigError, InvalidArgument, InvalidRank, Unsupported
from mpidist.topology import Topology


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
