"""Trees: the seeds' tests by their names, the Kani property for more ranks than Kani could take."""

import pytest

from mpidist.algorithms.tree import Role, child_ranks, parent_rank, role


def test_tree_roles():
    """::

       0
     1   2
    3 4 5 6
    """
    size, arity = 7, 2
    assert role(0, size, arity) == Role("root", 2)
    assert role(1, size, arity) == Role("internal", 2)
    assert role(3, size, arity) == Role("leaf", 0)
    assert parent_rank(3, arity) == 1
    assert parent_rank(1, arity) == 0
    assert parent_rank(0, arity) is None
    assert child_ranks(0, size, arity) == [1, 2]
    assert child_ranks(1, size, arity) == [3, 4]


@pytest.mark.parametrize("arity", [2, 3, 4])
def test_verify_tree_topology(arity):
    for size in range(1, 65):
        for rank in range(size):
            verify(rank, size, arity)


def verify(rank, size, arity):
    mine = role(rank, size, arity)
    parent, children = parent_rank(rank, arity), child_ranks(rank, size, arity)
    assert len(children) == mine.num_children
    if mine.kind == "root":
        assert rank == 0 and parent is None
    else:
        assert rank > 0 and parent is not None
        assert bool(children) == (mine.kind == "internal")
    for child in children:
        assert rank < child < size and parent_rank(child, arity) == rank
    if parent is not None:
        assert parent < rank and rank in child_ranks(parent, size, arity)


@pytest.mark.parametrize("arity", [2, 3, 4, 8])
def test_each_rank_has_one_parent(arity):
    for size in range(1, 65):
        children = [c for rank in range(size) for c in child_ranks(rank, size, arity)]
        assert children == list(range(1, size))
