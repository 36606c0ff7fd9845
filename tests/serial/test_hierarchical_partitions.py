"""Hierarchical allreduce over every way to put a few ranks on nodes."""

import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import Unsupported
from mpidist.schedule import prove


def partitions(ranks):
    """Every partition of `ranks`; groups in order of their first rank."""
    if not ranks:
        yield ()
        return
    first, rest = ranks[0], ranks[1:]
    for chosen in range(1 << len(rest)):
        group = (first, *(r for i, r in enumerate(rest) if chosen >> i & 1))
        others = tuple(r for r in rest if r not in group)
        for more in partitions(others):
            yield (group, *more)


BELL = {1: 1, 2: 2, 3: 5, 4: 15, 5: 52, 6: 203, 7: 877}


@pytest.mark.parametrize("size", BELL)
def test_leaders_over_every_partition(size):
    found = list(partitions(tuple(range(size))))
    assert len(found) == BELL[size]
    for groups in found:
        proof = prove("allreduce", "hierarchical_leaders", size, groups=groups)
        nodes = len(groups)
        assert proof.identical
        assert proof.messages == 2 * (size - nodes) + 2 * nodes * (nodes - 1), groups


@pytest.mark.parametrize("size", range(1, 9))
def test_lanes_over_every_equal_partition(size):
    for groups in partitions(tuple(range(size))):
        each, nodes = len(groups[0]), len(groups)
        if {len(group) for group in groups} != {each}:
            with pytest.raises(Unsupported, match="lanes need as many ranks on every node"):
                prove("allreduce", "hierarchical", size, groups=groups)
            continue
        proof = prove("allreduce", "hierarchical", size, groups=groups)
        inside, between = 2 * size * (each - 1), 2 * size * (nodes - 1)
        assert proof.identical and proof.messages == inside + between, groups


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_leaders"])
@pytest.mark.parametrize(
    "groups", [((0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11)), ((5, 0), (4, 1), (3, 2))]
)
def test_ranks_in_any_order(name, groups):
    assert prove("allreduce", name, sum(map(len, groups)), groups=groups).identical
