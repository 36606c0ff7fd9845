"""The wave: its proofs are those of the Python machine, field by field, and its verdicts too."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

import mpidist  # noqa: F401  (registers the algorithms)
from mpidist.errors import MpidistError
from mpidist.schedule import Copy, Recv, Reduce, Send, algorithm, algorithms, find, prove
from mpidist.schedule.registry import unregister
from mpidist.schedule.sweep import groupings, sweep
from mpidist.schedule.table import forms_of
from mpidist.schedule.wave import Given, proofs, proofs_of
from tests.mutation import mutate, write_down
from tests.support.how_long import takes_minutes

ALGORITHMS = algorithms()
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.label)


def comparable(proof, algorithm, groups):
    """Return the machine's proof as the wave finds it, which judges only what is claimed."""
    if algorithm.combines_as_tree(proof.size, groups):
        return proof
    return replace(proof, at_once=None, tree=None)


def served(algorithm, size):
    """The groupings that are proved, or none for a size that the algorithm does not serve."""
    if "groups" not in algorithm.uses:
        return [] if algorithm.unsupported(size) else [None]
    return [groups for groups in groupings(size) if algorithm.unsupported(size, groups) is None]


SIZES = [*range(1, 18), 20, 23, 24, 27, 31, 32, 33]  # `make stress` has those between, too


def compare(algorithm, size, roots, groups, arity=2):
    found = proofs(algorithm, size, roots, arity, groups)
    wanted = [
        prove(algorithm.collective, algorithm, size, root, arity=arity, groups=groups)
        for root in roots
    ]
    wanted = [comparable(proof, algorithm, groups) for proof in wanted]
    assert found == wanted, f"{algorithm.label}, {size} ranks, {groups}"


@pytest.mark.long
@every_algorithm
def test_proofs_of_1_to_33_ranks_are_the_machines(algorithm):
    for size in SIZES:
        roots = sorted({0, size // 2, size - 1}) if algorithm.contract.rooted else [0]
        nodes = served(algorithm, size)
        for groups in nodes if size < 8 else nodes[size % 2 :: 2]:
            compare(algorithm, size, roots, groups, 2 + size % 3)


@takes_minutes
@every_algorithm
def test_proofs_of_all_roots_nodes_and_arities_are_the_machines(algorithm):
    for size in range(1, 34):
        roots = range(size) if algorithm.contract.rooted else [0]
        for groups in served(algorithm, size):
            for arity in (2, 3, 4, 8) if "arity" in algorithm.uses else (2,):
                compare(algorithm, size, roots, groups, arity)


def judged(algorithm, count, random):
    """Compare the verdicts on mutants; return how many were proved."""
    right = 0
    for _ in range(count):
        size = random.randrange(2, 10)
        nodes = served(algorithm, size)
        if not nodes:
            continue
        groups = random.choice(nodes)
        root = random.randrange(size) if algorithm.contract.rooted else 0
        parts = algorithm.schedules(range(size), size, root, 2, groups)
        blocks = algorithm.block_count(size, groups=groups)
        changed = mutate(random, [write_down(part) for part in parts], blocks)
        if changed is None:
            continue
        mutant, what = changed
        broken = replace(algorithm, function=lambda rank, size, parts=mutant, **known: parts[rank])
        try:
            proof = prove(algorithm.collective, broken, size, root, groups=groups)
            wanted = [comparable(proof, algorithm, groups)]
        except MpidistError:
            wanted = None
        found = proofs(broken, size, [root], 2, groups)
        assert found == wanted, f"{algorithm.label}, {size} ranks, root {root}: {what}"
        right += wanted is not None
    return right


@every_algorithm
def test_verdicts_on_mutants_are_the_machines(algorithm):
    judged(algorithm, 8, Random(algorithm.label))


@takes_minutes
@every_algorithm
def test_verdicts_on_ten_thousand_mutants_are_the_machines(algorithm):
    assert judged(algorithm, 10_000 // len(ALGORITHMS) + 1, Random(-1)) >= 0


@pytest.fixture
def late():
    @algorithm("broadcast", "late")
    def late(rank, size, *, root):
        """Right for every root but 40, which forgets the last rank."""
        last = (root - 1) % size
        if rank == root:
            others = [(root + i) % size for i in range(1, size)]
            yield tuple(Send(peer) for peer in (others[:-1] if root == 40 else others))
        elif rank != last or root != 40:
            yield Recv(root)

    yield find("broadcast", "late").algorithm
    unregister("broadcast", "late")


def test_one_wrong_root_of_many_has_the_machines_counterexample(late):
    assert proofs(late, 64, range(64)) is None
    assert len(proofs(late, 64, range(40))) == 40
    (row,) = sweep(64, ["broadcast"], ["late"], jobs=1)
    assert row.proofs == 63
    assert row.counterexample.startswith("64 ranks, root 40: rank 39")
    assert "never written" in row.counterexample


@pytest.mark.parametrize("name", ["binomial", "linear"])
@pytest.mark.parametrize("collective", ["broadcast", "scatter", "gather"])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_roots_that_turn_an_algorithm_have_the_machines_figures_of_each_rank(
    collective, name, size
):
    algorithm = find(collective, name).algorithm
    forms = forms_of(algorithm, size, range(size))
    count = algorithm.block_count(size)
    assert all(form.turns(size, np.arange(size), count) for form in forms)
    compare(algorithm, size, range(size), None)
    compare(algorithm, size, [size - 1, 0, 1], None)


def test_a_root_that_turns_the_schedule_but_for_two_blocks_is_no_proof():
    def crossed(rank, size, *, root):
        """Scatter along the ranks; root 2 sends two ranks each other's blocks."""
        others = [(root + i) % size for i in range(1, size)]
        blocks = [*reversed(others[:2]), *others[2:]] if root == 2 else others
        if rank == root:
            yield tuple(Send(peer, block) for peer, block in zip(others, blocks))
        else:
            yield Recv(root, rank if root != 2 else blocks[others.index(rank)])

    tried = replace(find("scatter", "linear").algorithm, function=crossed)
    assert proofs(tried, 6, [0, 1, 2, 3]) is None
    assert len(proofs(tried, 6, [0, 1, 3, 5])) == 4


def test_an_order_that_is_claimed_but_not_kept_is_no_proof():
    ring = replace(find("allreduce", "ring").algorithm, ordered=True)
    assert proofs(ring, 8, [0]) is None
    assert proofs(replace(ring, ordered=False), 8, [0]) is not None


@pytest.mark.parametrize("name", ["ring", "rabenseifner", "recursive_doubling", "tree", "direct"])
def test_a_tree_that_is_claimed_is_judged_as_by_the_machine(name):
    known = find("allreduce", name).algorithm
    verdicts = set()
    for size in range(2, 18):
        claimed = replace(known, tree=True, at_once=False)
        machine = prove("allreduce", known, size)
        if machine.tree:
            assert proofs(claimed, size, [0]) == [machine]
        else:
            assert proofs(claimed, size, [0]) is None
            with pytest.raises(MpidistError, match="fixed tree"):
                prove("allreduce", claimed, size)
        verdicts.add(machine.tree)
    assert verdicts >= {name == "direct"}  # both, where it depends on the size


def test_contributions_that_are_claimed_to_be_combined_at_once_but_are_not_are_no_proof():
    doubling = find("allreduce", "recursive_doubling").algorithm
    assert proofs(replace(doubling, at_once=True), 8, [0]) is None
    assert proofs(replace(doubling, at_once=False), 8, [0])[0].at_once is False


@pytest.mark.parametrize("brought", ["3 by 2", "a copy between"])
def test_a_tree_is_judged_by_who_brings_what(brought):
    def odd(rank, size):
        if brought == "3 by 2":  # ranks 2 and 3 swap their data, so that 0 gets them crosswise
            if rank > 1:
                yield Send(5 - rank), Recv(5 - rank, 0, "tmp")
                yield Send(0, 0, "tmp")
        elif rank:
            yield Send(0)
        if rank == 1 and brought == "3 by 2":
            yield Send(0)
        if not rank and brought == "3 by 2":
            yield Reduce(1), Reduce(3), Reduce(2)
        elif not rank:
            yield Reduce(1), Copy(0, 0, "out", "tmp"), Reduce(2), Reduce(3)
        if rank == 0:
            yield tuple(Send(peer) for peer in range(1, size))
        else:
            yield Recv(0)

    known = replace(find("allreduce", "direct").algorithm, function=odd, blocks=1, at_once=False)
    assert proofs(replace(known, ordered=False), 4, [0]) is not None
    claimed = replace(known, ordered=False, tree=True)
    assert proofs(claimed, 4, [0]) is None
    with pytest.raises(MpidistError, match="fixed tree"):
        prove("allreduce", claimed, 4)


def test_a_generator_that_arrays_do_not_suit_is_proved_rank_by_rank():
    def by_bits(rank, size, *, root):
        for k in reversed(range(size.bit_length())):
            if rank != root and (rank ^ root).bit_length() == k + 1:
                yield Recv(root)
            elif rank == root:
                yield tuple(Send(p) for p in range(size) if (p ^ root).bit_length() == k + 1)

    tried = replace(find("broadcast", "linear").algorithm, function=by_bits)
    compare(tried, 9, [0, 5], None)


@pytest.mark.parametrize(
    "label",
    [
        "allreduce hierarchical",
        "allreduce hierarchical_leaders",
        "broadcast tree",
        "broadcast double_binary_tree",  # with strands
        "reduce tree",
        "reduce hierarchical",
        "reduce direct",
    ],
)
def test_several_parameters_together_have_the_proofs_of_each(label):
    algorithm = find(*label.split()).algorithm
    roots = tuple(range(9)) if algorithm.contract.rooted else (0,)
    several = [
        Given(roots, arity, groups)
        for groups in served(algorithm, 9)
        for arity in ((2, 3) if "arity" in algorithm.uses else (2,))
    ]
    together = proofs_of(algorithm, 9, [*several, several[0]])
    alone = [proofs(algorithm, 9, given.roots, given.arity, given.groups) for given in several]
    assert together == [*alone, alone[0]]


def test_more_than_few_roots_are_run_in_parts():
    for name in ("tree", "direct"):
        algorithm = find("reduce", name).algorithm
        (found,) = proofs_of(algorithm, 7, [Given(tuple(range(7)), few=3)])
        assert found == proofs(algorithm, 7, range(7))


def test_one_wrong_arity_of_several_has_the_machines_counterexample():
    @algorithm("broadcast", "some")
    def some(rank, size, *, root, arity):
        """Right for all arities but 3, which sends nothing to the last rank."""
        others = [(root + i) % size for i in range(1, size)]
        if arity == 3:
            others = others[:-1]
        if rank == root:
            yield tuple(Send(peer) for peer in others)
        elif rank in others:
            yield Recv(root)

    try:
        (row,) = sweep(40, ["broadcast"], ["some"], jobs=1)
    finally:
        unregister("broadcast", "some")
    assert row.proofs == 3 * 40
    assert row.counterexample.startswith("40 ranks, root 0, arity 3: rank 39")
