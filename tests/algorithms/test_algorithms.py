"""Every registered algorithm: proved for sizes 1 to 33, with roots and arities, and counted."""

from math import ceil, log2

import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import Unsupported
from mpidist.schedule import algorithms, prove
from tests.support.how_long import roots

SIZES = range(1, 34)
ARITIES = (2, 3, 4, 8)


def lg(p):
    return ceil(log2(p))


def floor_lg(p):
    return p.bit_length() - 1


def base(p):
    return 1 << floor_lg(p)


def extras(p):
    return p - base(p)


def folded(p):
    """Two more rounds, in and out, where the size is no power of two."""
    return 2 * (extras(p) > 0)


def subtrees(p):
    """Blocks that move in a binomial gather: the size of every subtree but the root's."""
    return sum(min(rank & -rank, p - rank) for rank in range(1, p))


def scanned(p):
    """Messages of a scan by recursive doubling: of all ranks but those without a partner."""
    return p * lg(p) - (1 << lg(p)) + 1


def up_and_down(p):
    """Messages of a scan up and down a binomial tree."""
    return 2 * p - 1 - bin(p).count("1") - floor_lg(p)


def up_and_down_in_turn(p):
    """The distances d with 2d <= p on the way up, and with 3d <= p on the way down."""
    return floor_lg(p) + (p // 3).bit_length()


def moved(form):
    """An exclusive scan: all data move by one rank, then the others scan."""
    return lambda p: p - 1 + form(p - 1) if p > 1 else 0


def bits(p):
    return sum(bin(number).count("1") for number in range(p))


# Messages in a row, messages, blocks moved, as functions of the size; None: no closed form.
LINES = (lambda p: p - 1,) * 3
ONE_EACH = (lambda p: min(p - 1, 1), lambda p: p - 1, lambda p: p - 1)
BINOMIAL = (lg, lambda p: p - 1, lambda p: p - 1)
BINOMIAL_BLOCKS = (lg, lambda p: p - 1, subtrees)
UP_AND_DOWN = (lambda p: p if p > 1 else 0, lambda p: 2 * (p - 1), lambda p: 2 * (p - 1))
RING = (lambda p: p - 1, lambda p: p * (p - 1), lambda p: p * (p - 1))
ALL_AT_ONCE = (lambda p: min(p - 1, 1), lambda p: p * (p - 1), lambda p: p * (p - 1))
TREE = (None, lambda p: p - 1, lambda p: p - 1)
TWO_TREES = (None, lambda p: 2 * (p - 1), lambda p: 2 * (p - 1))
DISSEMINATION = (lg, lambda p: p * lg(p), lambda p: p * lg(p))
TWICE_AT_ONCE = (lambda p: 2 * min(p - 1, 1),)
# Through one leader: all of it goes up or down a binomial tree, and each rank's own part besides.
BY_A_LEADER = (lambda p: lg(p) + 1 if p > 1 else 0, lambda p: 2 * (p - 1), lambda p: p * p - 1)
FORMS = {
    "allreduce linear": UP_AND_DOWN,
    "allreduce ring": tuple(lambda p, f=f: 2 * f(p) for f in RING),
    "allreduce tree": TWO_TREES,
    "allreduce binomial": tuple(lambda p, f=f: 2 * f(p) for f in BINOMIAL),
    "allreduce recursive_doubling": (
        lambda p: floor_lg(p) + folded(p),
        lambda p: base(p) * floor_lg(p) + 2 * extras(p),
        lambda p: base(p) * floor_lg(p) + 2 * extras(p),
    ),
    "allreduce rabenseifner": (
        lambda p: 2 * floor_lg(p) + folded(p),
        lambda p: 2 * base(p) * floor_lg(p) + 2 * extras(p),
        lambda p: 2 * base(p) * (base(p) - 1) + 2 * extras(p) * base(p),
    ),
    "allreduce direct": tuple(lambda p, f=f: 2 * f(p) for f in ALL_AT_ONCE),
    "allreduce double_binary_tree": (None, lambda p: 4 * (p - 1), lambda p: 4 * (p - 1)),
    "broadcast linear": ONE_EACH,
    "broadcast tree": TREE,
    "broadcast binomial": BINOMIAL,
    "broadcast chain": LINES,
    "broadcast scatter_allgather": (
        lambda p: lg(p) + p - 1,
        lambda p: p * (p - 1),
        lambda p: subtrees(p) + (p - 1) ** 2,
    ),
    "broadcast double_binary_tree": (lg, lambda p: 2 * (p - 1), lambda p: 2 * (p - 1)),
    "reduce linear": LINES,
    "reduce direct": (
        lambda p: 2 * min(p - 1, 1),
        lambda p: (p + 1) * (p - 1),
        lambda p: (p + 1) * (p - 1),
    ),
    "reduce tree": TREE,
    "reduce binomial": BINOMIAL,
    "reduce reduce_scatter_gather": (
        lambda p: 2 * floor_lg(p) + (extras(p) > 0),
        lambda p: base(p) * floor_lg(p) + p - 1,
        lambda p: base(p) * (p - 1) + subtrees(base(p)),
    ),
    "allgather linear": (lambda p: 2 if p > 1 else 0, lambda p: 2 * (p - 1), lambda p: p * p - 1),
    "allgather ring": RING,
    "allgather recursive_doubling": (
        lambda p: floor_lg(p) + folded(p),
        lambda p: base(p) * floor_lg(p) + 2 * extras(p),
        lambda p: p * (p - 1),
    ),
    "allgather bruck": (lg, lambda p: p * lg(p), lambda p: p * (p - 1)),
    "allgather neighbor_exchange": (
        lambda p: p // 2,
        lambda p: p * p // 2,
        lambda p: p * (p - 1),
    ),
    "allgather direct": ALL_AT_ONCE,
    "reduce_scatter linear": (UP_AND_DOWN[0], lambda p: 2 * (p - 1), lambda p: p * p - 1),
    "reduce_scatter ring": RING,
    "reduce_scatter recursive_halving": (
        lambda p: floor_lg(p) + folded(p),
        lambda p: base(p) * floor_lg(p) + 2 * extras(p),
        lambda p: p * (base(p) - 1) + extras(p) * (p + 1),
    ),
    "reduce_scatter direct": ALL_AT_ONCE,
    "gather linear": ONE_EACH,
    "gather binomial": BINOMIAL_BLOCKS,
    "scatter linear": ONE_EACH,
    "scatter binomial": BINOMIAL_BLOCKS,
    "alltoall linear": ALL_AT_ONCE,
    "alltoall pairwise": RING,
    "alltoall bruck": (lg, lambda p: p * lg(p), lambda p: p * bits(p)),
    "scan chain": LINES,
    "scan recursive_doubling": (lg, scanned, scanned),
    "scan binomial": (up_and_down_in_turn, up_and_down, up_and_down),
    "exscan chain": (LINES[0], *(moved(LINES[0]),) * 2),
    "exscan recursive_doubling": (
        lambda p: 1 + lg(p - 1) if p > 1 else 0,
        *(moved(scanned),) * 2,
    ),
    "exscan binomial": (
        lambda p: 1 + up_and_down_in_turn(p - 1) if p > 1 else 0,
        *(moved(up_and_down),) * 2,
    ),
    "barrier linear": UP_AND_DOWN,
    "barrier tree": TWO_TREES,
    "barrier dissemination": DISSEMINATION,
    # Two levels, where all ranks are on one node; on more: test_hierarchical_partitions.py.
    "allreduce hierarchical": tuple(lambda p, f=f: 2 * f(p) for f in ALL_AT_ONCE),
    "reduce hierarchical": TWICE_AT_ONCE + (lambda p: p * p - 1,) * 2,
    "broadcast hierarchical": TWICE_AT_ONCE + ALL_AT_ONCE[1:],
    "allgather hierarchical": ALL_AT_ONCE,
    "reduce_scatter hierarchical": ALL_AT_ONCE,
    "barrier hierarchical": DISSEMINATION,
    "allreduce hierarchical_leaders": tuple(lambda p, f=f: 2 * f(p) for f in BINOMIAL),
    "reduce hierarchical_leaders": BINOMIAL,
    "broadcast hierarchical_leaders": BINOMIAL,
    "allgather hierarchical_leaders": BY_A_LEADER,
    "reduce_scatter hierarchical_leaders": BY_A_LEADER,
    "barrier hierarchical_leaders": tuple(lambda p, f=f: 2 * f(p) for f in BINOMIAL),
}


def settings(algorithm, size):
    """Roots and arities to prove an algorithm with."""
    for root in roots(algorithm, size):
        for arity in ARITIES if "arity" in algorithm.uses else (2,):
            yield root, arity


@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda a: a.label.replace(" ", "-"))
def test_proved_and_counted(algorithm):
    forms = FORMS.get(algorithm.label, (None,) * 3)
    for size in SIZES:
        if algorithm.unsupported(size):
            with pytest.raises(Unsupported, match="served by .* and native"):
                prove(algorithm.collective, algorithm, size)
            continue
        for root, arity in settings(algorithm, size):
            proof = prove(algorithm.collective, algorithm, size, root, arity=arity)
            found = (proof.depth, proof.messages, proof.blocks_moved)
            expected = tuple(f and f(size) for f in forms)
            same = all(e is None or e == f for e, f in zip(expected, found))
            assert same, f"{size} ranks, root {root}, arity {arity}: {found}, not {expected}"
            assert proof.identical


def test_every_shipped_algorithm_is_counted():
    shipped = {a.label for a in algorithms() if a.function.__module__.startswith("mpidist.")}
    assert shipped <= set(FORMS)


@pytest.mark.parametrize(("arity", "levels"), [(2, 1), (2, 2), (2, 5), (3, 3), (4, 3), (8, 2)])
def test_messages_in_a_row_of_full_trees(arity, levels):
    size = (arity ** (levels + 1) - 1) // (arity - 1)
    depth = {
        name: prove(*name.split(), size, arity=arity).depth
        for name in ("reduce tree", "broadcast tree", "allreduce tree", "barrier tree")
    }
    assert depth == {
        "reduce tree": arity * levels,
        "broadcast tree": levels,
        "allreduce tree": (arity + 1) * levels,
        "barrier tree": (arity + 1) * levels,
    }


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7, 8, 12, 15, 16, 31, 33])
def test_bytes_per_rank(p):
    """No rank sends more than the docstrings say, in shares of the whole buffer."""
    once, rest = (p - 1) / p, extras(p) > 0
    most = {
        "allreduce ring": 2 * once,
        "allreduce direct": 2 * once,
        "reduce direct": 1,
        "allreduce binomial": 1 + lg(p),
        "allreduce recursive_doubling": floor_lg(p) + rest,
        "allreduce rabenseifner": 2 * once + rest,
        "allreduce double_binary_tree": 2,
        "allreduce tree": 3,
        "reduce_scatter ring": once,
        "reduce_scatter direct": once,
        "reduce_scatter recursive_halving": 1 if rest else once,
        "allgather ring": once,
        "allgather bruck": once,
        "allgather recursive_doubling": once + rest * 4 / 3,
        "alltoall pairwise": once,
        "alltoall linear": once,
        "broadcast chain": 1,
        "broadcast binomial": lg(p),
        "broadcast double_binary_tree": 1,
        "broadcast scatter_allgather": 2 * once,
        "reduce binomial": 1,
        "reduce linear": 1,
        "reduce reduce_scatter_gather": 3 / 2,
        "gather linear": 1 / p,
        "gather binomial": 1 / 2,
        "scatter binomial": once,
        "scan chain": 1,
        "scan recursive_doubling": lg(p),
        "scan binomial": log2(p),
        "exscan chain": 2,
        "exscan recursive_doubling": 1 + lg(p),
        "exscan binomial": 1 + log2(p),
    }
    for label, bound in most.items():
        proof = prove(*label.split(), p)
        assert max(proof.blocks_sent) / proof.block_count <= bound * (1 + 1e-9), label
