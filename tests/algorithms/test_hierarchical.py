"""Two-level algorithms over every way to put a few ranks on nodes."""

import itertools
from math import ceil, log2

import numpy as np
import pytest

from mpidist import run_simulated
from mpidist.algorithms.levels import remembering
from mpidist.errors import InvalidArgument, MpidistError, UnknownName, Unsupported
from mpidist.schedule import algorithms, find, prove
from mpidist.schedule.cost import cost
from mpidist.schedule.ranks import Turn
from mpidist.schedule.sweep import sweep


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


BELL = {1: 1, 2: 2, 3: 5, 4: 15, 5: 52, 6: 203}


def lg(p):
    return ceil(log2(p))


# Messages of p ranks on m nodes; g ranks on each where the nodes must be equal.
LANES = {
    "allreduce": lambda p, m, g: 2 * p * (g - 1) + 2 * p * (m - 1),
    "reduce": lambda p, m, g: p * (g - 1) + g * (m - 1) + g - 1,
    # Nobody on the root's node hands back to the root what came from it.
    "broadcast": lambda p, m, g: (g - 1) + g * (m - 1) + p * (g - 1) - (g - 1),
    "allgather": lambda p, m, g: p * (m - 1) + p * (g - 1),
    "reduce_scatter": lambda p, m, g: p * (m - 1) + p * (g - 1),
    "barrier": lambda p, m, g: p * (lg(g) + lg(m)),
}
LEADERS = {
    "allreduce": lambda p, m: 2 * (p - m) + 2 * m * (m - 1),
    "reduce": lambda p, m: p - 1,
    "broadcast": lambda p, m: p - 1,
    "allgather": lambda p, m: 2 * (p - m) + m * (m - 1),
    "reduce_scatter": lambda p, m: 2 * (p - m) + m * (m - 1),
    "barrier": lambda p, m: 2 * (p - m) + m * lg(m),
}


def roots(collective, size):
    return range(size) if find(collective, "hierarchical").algorithm.contract.rooted else (0,)


def test_what_is_made_of_two_levels():
    made = {(a.collective, a.name) for a in algorithms() if a.local}
    expected = {(c, "hierarchical") for c in LANES} | {(c, "hierarchical_leaders") for c in LEADERS}
    assert made >= expected


@pytest.mark.parametrize("collective", LEADERS)
@pytest.mark.parametrize("size", BELL)
def test_leaders_over_every_partition(collective, size):
    found = list(partitions(tuple(range(size))))
    assert len(found) == BELL[size]
    for groups in found:
        for root in roots(collective, size):
            proof = prove(collective, "hierarchical_leaders", size, root, groups=groups)
            expected = LEADERS[collective](size, len(groups))
            assert proof.identical and proof.messages == expected, (groups, root)


@pytest.mark.parametrize("collective", LANES)
@pytest.mark.parametrize("size", range(1, 9))
def test_lanes_over_every_equal_partition(collective, size):
    uneven = 0
    for groups in partitions(tuple(range(size))):
        each, nodes = len(groups[0]), len(groups)
        if {len(group) for group in groups} != {each}:
            uneven += 1
            if uneven < 5:
                with pytest.raises(Unsupported, match="expected equally many ranks"):
                    prove(collective, "hierarchical", size, groups=groups)
            continue
        for root in roots(collective, size):
            proof = prove(collective, "hierarchical", size, root, groups=groups)
            expected = LANES[collective](size, nodes, each)
            assert proof.identical and proof.messages == expected, (groups, root)


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_leaders"])
@pytest.mark.parametrize("collective", LANES)
@pytest.mark.parametrize(
    "groups", [((0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11)), ((5, 0), (4, 1), (3, 2))]
)
def test_ranks_in_any_order(name, collective, groups):
    size = sum(map(len, groups))
    for root in roots(collective, size):
        assert prove(collective, name, size, root, groups=groups).identical


@pytest.mark.parametrize(
    ("collective", "name"),
    [
        ("allreduce", "hierarchical/ring/rabenseifner"),
        ("allreduce", "hierarchical/linear/recursive_doubling"),
        ("allreduce", "hierarchical_leaders/tree:3/tree:2"),
        ("allreduce", "hierarchical_leaders/linear/direct"),
        ("reduce", "hierarchical/ring/reduce_scatter_gather"),
        ("reduce", "hierarchical_leaders/reduce_scatter_gather/linear"),
        ("broadcast", "hierarchical/bruck/scatter_allgather"),
        ("broadcast", "hierarchical_leaders/scatter_allgather/chain"),
        ("allgather", "hierarchical/bruck/direct"),
        ("allgather", "hierarchical_leaders/scatter_allgather/bruck"),
        ("reduce_scatter", "hierarchical/ring/recursive_halving"),
        ("reduce_scatter", "hierarchical_leaders/tree:2/direct"),
        ("barrier", "hierarchical/linear/tree:3"),
        ("barrier", "hierarchical_leaders/linear/linear"),
    ],
)
def test_made_of_other_algorithms(collective, name):
    """Any parts do, however they cut the data; what a part cannot serve is refused by its name."""
    uneven = [((0, 1, 2), (3, 4)), ((4, 0, 2), (1,), (3, 5, 6))] if "leaders" in name else []
    for groups in [((0, 1, 2), (3, 4, 5)), ((0, 2), (5, 1), (3, 4)), ((0, 1, 2, 3),), *uneven]:
        size = sum(map(len, groups))
        if find(collective, name).algorithm.unsupported(size, groups=groups) is not None:
            continue
        for root in roots(collective, size):
            assert prove(collective, name, size, root, groups=groups).identical


def test_a_part_says_what_it_cannot_serve():
    with pytest.raises(UnknownName, match="allgather algorithm 'recursive_halving'"):
        prove("allreduce", "hierarchical/recursive_halving/ring", 4, groups=((0, 1), (2, 3)))
    with pytest.raises(Unsupported, match="allgather neighbor_exchange on 3 ranks: "):
        prove("broadcast", "hierarchical/neighbor_exchange/linear", 3)


@pytest.mark.parametrize("levels", ["direct", "direct/", "/ring", "direct/ring/ring"])
def test_two_levels_must_be_named(levels):
    with pytest.raises(InvalidArgument, match="expected hierarchical/LOCAL/ACROSS"):
        find("allreduce", f"hierarchical/{levels}")


def test_levels_need_a_hierarchical_algorithm():
    with pytest.raises(InvalidArgument, match="ring has no levels"):
        find("allreduce", "ring/direct/ring")
    with pytest.raises(UnknownName, match="did you mean"):
        find("allreduce", "hierarchic/direct/ring")


def test_lanes_carry_no_more_than_leaders():
    """All lanes of a node together send to other nodes what its leader sends alone."""
    rates = {"alpha": 1e-6, "beta": 1e-9, "groups": ((0, 1), (2, 3))}
    for collective, most in (("allreduce", 4000), ("reduce", 4000), ("broadcast", 4000)):
        lanes = cost(collective, "hierarchical", 4, 4000, **rates)
        leaders = cost(collective, "hierarchical_leaders", 4, 4000, **rates)
        assert lanes.between == leaders.between and max(lanes.between) == most
    for collective in ("allgather", "reduce_scatter"):
        for name in ("hierarchical", "hierarchical_leaders"):
            assert cost(collective, name, 4, 4000, **rates).between == (2000, 2000)


def test_other_parts_are_swept():
    (row,) = sweep(range(1, 5), ["allreduce"], ["hierarchical_leaders/tree:2/rabenseifner"])
    assert row.name == "hierarchical_leaders/tree:2/rabenseifner" and row.proved and row.proofs > 9


ALIGNED = [((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 5)), ((0, 1, 2, 3), (4, 5, 6))]
UNALIGNED = [((0, 2), (1, 3)), ((0, 1, 2), (3, 4, 5)), ((0,), (1, 2))]
LEVELS = [
    f"{way}/{local}/{across}"
    for way in ("hierarchical", "hierarchical_leaders")
    for local in ("direct", "in_place", "in_place_fetched", "slots", "ring")
    for across in ("direct", "recursive_doubling", "ring")
]


@pytest.mark.parametrize("groups", [*ALIGNED, *UNALIGNED], ids=str)
def test_aligned_nodes_of_a_power_of_two_keep_the_fixed_tree(groups):
    """Whoever says that he combines as the tree does so, and on other nodes nobody says it."""
    size, said = sum(map(len, groups)), set()
    for collective, levels in itertools.product(("allreduce", "reduce", "reduce_scatter"), LEVELS):
        local, across = levels.split("/")[1:]
        try:
            choice = find(collective, levels)
            if choice.algorithm.unsupported(size, groups) is not None:
                continue
        except MpidistError:  # there is no such algorithm of the part
            continue
        is_tree = prove(collective, choice, size, groups=groups).tree
        if choice.algorithm.combines_as_tree(size, groups):
            said.add(levels)
            assert is_tree and "ring" not in levels, levels
        assert not is_tree or groups in ALIGNED
    assert bool(said) == (groups in ALIGNED)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("groups", ALIGNED, ids=str)
def test_a_fixed_tree_has_the_same_bits_on_nodes_as_on_one(groups, dtype, op):
    size = sum(map(len, groups))
    nodes = [next(n for n, group in enumerate(groups) if rank in group) for rank in range(size)]
    equal = len({len(group) for group in groups}) == 1
    names = ["auto", "direct", *["hierarchical/direct/direct"] * equal]
    refused = "hierarchical_leaders/linear/direct"  # linear is no tree on a node

    def call(comm, names=(*names, refused)):
        x = np.random.default_rng(comm.rank).standard_normal(1001).astype(dtype)
        found = {}
        for name in names:
            try:
                found[name] = comm.allreduce(x, op, order="tree", algorithm=name).tobytes()
            except Unsupported as error:
                found[name] = str(error)
        return found

    alone = run_simulated(size, lambda comm: call(comm, ["direct"]))
    (expected,) = {found["direct"] for found in alone}
    for found in run_simulated(size, call, nodes=nodes):
        assert f"{refused} groups" in found.pop(refused) and set(found.values()) == {expected}


def test_what_equal_blocks_of_all_ranks_stand_for_is_found_once():
    """A ring makes the number of the block that it passes on anew in each round."""
    asked = []

    def double(block):
        asked.append(block)
        return 2 * block

    found, rank = remembering(double), Turn(0, 0, 1, 8)
    assert found((rank - 3) % 8) is found((rank + 5) % 8)
    assert len(asked) == 1
    assert found((rank - 2) % 8).offset == 2 * 6 and len(asked) == 2
